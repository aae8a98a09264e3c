"""What cross_validate gives: results, comparisons, print-outs, files, figures."""
