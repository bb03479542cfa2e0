import io

from mlx_dp.orchestrator.model.progress import LineProgress, terminal_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_say_when_a_stage_starts_and_when_it_is_done():
    output = io.StringIO()
    progress = LineProgress(output)
    for stage, done, total in [("A", 0, 0), ("A", 1, 2), ("A", 2, 2), ("A", 2, 2), ("B", 0, 5)]:
        progress.update(stage, done, total)
    assert output.getvalue() == "A ...\nA: done\nB ...\n"


def test_a_pipe_gets_lines():
    output = io.StringIO()
    with terminal_progress(output) as progress:
        progress.update("A", 1, 1)
    assert output.getvalue() == "A ...\nA: done\n"


def test_a_terminal_gets_a_bar_for_every_stage():
    output = Terminal()
    with terminal_progress(output) as progress:
        progress.update("Fetching", 0, 0)
        progress.update("Fetching", 5, 10)
        progress.update("Converting", 1, 3)
    assert "Fetching" in output.getvalue()
    assert "Converting" in output.getvalue()


def test_a_models_name_is_no_markup():
    output = Terminal()
    with terminal_progress(output) as progress:
        progress.update("Fetching org/[x] [/y]", 1, 3)
    assert "org/[x] [/y]" in output.getvalue()
