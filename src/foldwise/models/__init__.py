"""What is cross-validated: models, families of models, and models of other packages."""
