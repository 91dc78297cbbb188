"""How a command line ends."""

import pytest

from podium.trainer.cli import run_main
from podium.trainer.config import PPOConfig
from podium.trainer.config.load import load_config
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


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (
            "custom_reward_function.reward_kwarg={api_key: sk-very-secret}",
            "reward_kwarg={api_key: <redacted>}: there is",
        ),
        ("custom_reward_function.reward_kwargs={api_key: sk-very-secret", "not of the form key=value"),
        ("custom_reward_function.reward_kwargs=sk-very-secret", "reward_kwargs takes dict[str, typing.Any], got str"),
        ("reward_model.uri=http://me:sk-very-secret@host", "reward_model.uri=http://<redacted>@host: there is no key"),
    ],
)
def test_an_argument_is_shown_without_its_secrets(capsys, argument: str, shown: str):
    with pytest.raises(SystemExit):
        run_main(lambda: print(load_config(PPOConfig, [argument])))
    out, err = capsys.readouterr()
    assert shown in err and "very-secret" not in out + err


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
