import io

from rich.console import Console

from podium.utils.console import ConsoleLogger


def logger(*, terminal, total=100):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, force_interactive=terminal, width=160, _environ={})
    return ConsoleLogger(total, console), out


def metrics(score, gen=1.0):
    return {
        "critic/score/mean": score,
        "actor/ppo_kl": 0.00123456,
        "response_length/mean": 7.0,
        "timing_s/gen": gen,
        "timing_s/update_actor": 12.5,
        "timing_s/step": 14.0,
        "perf/time_per_step": 14.0,
    }


def test_plain_lines_are_one_a_step_and_aligned():
    log, out = logger(terminal=False)
    log.log(1, metrics(0.25))
    log.log(100, metrics(0.123456, gen=100.0))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step   1/100  reward     0.25  kl_old 0.001235  length        7")
    assert [len(line) for line in lines] == [len(lines[0])] * 2
    for word in ("reward", "kl_old", "length", "gen", "update_actor"):
        assert lines[0].index(word) == lines[1].index(word)
    assert "\x1b" not in out.getvalue()


def test_validation_is_shown_in_either_mode():
    for terminal in (False, True):
        log, out = logger(terminal=terminal)
        log.log(0, {"val/sort/score": 0.41})
        log.close()
        assert "val/sort/score 0.41" in out.getvalue()


def test_a_terminal_gets_a_live_line_that_close_ends():
    log, out = logger(terminal=True)
    log.log(1, metrics(0.25))
    log.log(2, metrics(0.5))
    log.close()
    log.close()
    text = out.getvalue()
    assert "2/100" in text and "reward      0.5" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again


def test_table_cells_are_shown_as_they_are():
    log, out = logger(terminal=False)
    log.table("validation [bold]", ["prompt", "score"], [["[red]a\x1b[2Jb\n", 1.0], ["x" * 1000, None], ["\udc80é", 0]])
    text = out.getvalue()
    assert "validation [bold]" in text
    assert "[red]a\\x1b[2Jb\\n" in text
    assert "\x1b" not in text
    assert text.count("x") < 500 and "…" in text
    assert "\\udc80é" in text
