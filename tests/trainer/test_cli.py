"""How a command line ends."""

import pytest

from podium.trainer.cli import run_main
from podium.utils.errors import UserError


def test_done_is_silent(capsys):
    run_main(lambda: None)
    assert capsys.readouterr() == ("", "")


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    def main() -> None:
        raise UserError("data.train_files=x:\n  there is no\tsuch file")

    with pytest.raises(SystemExit) as end:
        run_main(main)
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "error: data.train_files=x: there is no such file\n")


def test_ctrl_c(capsys):
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        run_main(main)
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_a_fault_of_ours_keeps_its_traceback():
    def main() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        run_main(main)
