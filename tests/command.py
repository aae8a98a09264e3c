"""The command line as a test calls it."""

import pytest

from foldwise.studies import cli


def fails(capsys, *arguments, code=1) -> str:
    """The message of a command that must fail and print nothing else."""
    if code == 2:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        assert stop.value.code == 2
    else:
        assert cli.main(list(arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    lines = captured.err.splitlines(keepends=True)
    begins = ("foldwise: reading ", "foldwise: study ")  # said at once, whatever follows
    return "".join(line for line in lines if not line.startswith(begins))
