"""Megatron's log and TensorBoard files are read right, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.demo.curves import NoCurveError, read_curve
from megatron.demo.figure import draw, rolling_mean
from megatron.demo.training_log import TrainingLog, parse_iteration
from tools import plot_log

PNG = b"\x89PNG\r\n"


def log_line(number: int, loss: float, milliseconds: float = 1000.0, total: int = 50, batch: int = 32) -> str:
    return (
        f" [2026-01-02 03:04:05.678901] iteration {number:8d}/{total:8d} | consumed samples: {number * batch:12d} | "
        f"elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 0.0 | "
        f"learning rate: 1.500000E-03 | global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | "
        f"grad norm: 0.990 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def validation_line(number: int, loss: float) -> str:
    return f" validation loss at iteration {number} on validation set | lm loss value: {loss:.6E} | PPL: 9 |\n"


LINES = [
    "  seq_length ...................................... 128\n",
    "  encoder_seq_length .............................. 64\n",
    log_line(1, 6.9, 3000),
    "(min, max) time across ranks (ms):\n",
    log_line(5, 6.1),
    log_line(10, 5.5, 2000),
    validation_line(10, 5.75),
]


def test_a_training_line_is_read() -> None:
    iteration = parse_iteration(log_line(10, 5.5, 2000))
    assert iteration is not None
    assert (iteration.number, iteration.total, iteration.loss, iteration.seconds) == (10, 50, 5.5, 2.0)
    assert (iteration.global_batch_size, iteration.learning_rate, iteration.grad_norm) == (32, 1.5e-3, 0.99)


@pytest.mark.parametrize(
    "line",
    [
        "Overwriting rerun_state_machine.current_iteration from -1 to 0...",
        " [2026-01-02 03:04:05] iteration 3/ 50 | consumed samples: 96 | number of skipped iterations: 1 |",
        validation_line(3, 5.0),
        "",
    ],
)
def test_other_lines_are_not_training_lines(line: str) -> None:
    assert parse_iteration(line) is None


def test_a_log_line_stands_for_all_iterations_since_the_one_before() -> None:
    log = TrainingLog.of(LINES)
    assert log.steps == [1, 4, 5]
    assert log.seconds == [3.0, 7.0, 17.0]
    assert log.validation == {10: 5.75}
    assert log.sequence_length == 128
    assert log.tokens_per_second() == pytest.approx(10 * 32 * 128 / 17)


def test_a_resumed_run_counts_from_its_own_first_line() -> None:
    log = TrainingLog.of([LINES[0], log_line(101, 3.0), log_line(102, 2.9)])
    assert log.seconds == [1.0, 2.0]


def test_speed_is_unknown_without_a_sequence_length_or_an_iteration() -> None:
    assert TrainingLog.of(LINES[2:]).tokens_per_second() is None
    assert TrainingLog.of(LINES[:1]).tokens_per_second() is None


def test_the_loss_at_the_end_averages_the_last_tenth_of_the_lines() -> None:
    losses = [float(value) for value in range(300, 0, -1)]
    log = TrainingLog.of(log_line(number, loss) for number, loss in enumerate(losses, 1))
    assert (log.loss_at_start(), log.loss_at_end()) == (300.0, 5.5)
    assert TrainingLog.of(LINES).loss_at_end() == 5.5


def test_tensorboard_and_log_of_a_run_give_one_curve(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for number, loss in ((1, 6.5), (5, 6.0), (10, 5.5)):
            writer.add_scalar("lm loss", loss, number)
            writer.add_scalar("lm loss vs samples", loss, number * 32)
        writer.add_scalar("lm loss validation", 5.75, 10)
    (tmp_path / "train.log").write_text(
        "".join([log_line(1, 6.5), log_line(5, 6.0), log_line(10, 5.5), validation_line(10, 5.75)])
    )
    from_log, from_events = read_curve(tmp_path / "train.log"), read_curve(tmp_path / "tensorboard")
    assert from_log.iterations == from_events.iterations == [1, 5, 10]
    assert from_log.losses == from_events.losses == [6.5, 6.0, 5.5]
    assert from_log.validation == from_events.validation == {10: 5.75}
    assert from_log.seconds_at(7) == from_log.seconds[1]


def test_what_holds_no_loss_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("nothing\n")
    for path, reason in (
        ("empty.log", "no line like"),
        ("missing.log", "cannot be read"),
        (".", "no TensorBoard scalars"),
    ):
        with pytest.raises(NoCurveError, match=reason) as refusal:
            read_curve(tmp_path / path)
        assert str(tmp_path / path) in str(refusal.value)


def test_the_rolling_mean_looks_back_only() -> None:
    assert rolling_mean([4.0, 2.0, 0.0, 6.0], 2) == [4.0, 3.0, 1.0, 3.0]
    assert rolling_mean([4.0, 2.0], 1) == [4.0, 2.0]


@pytest.mark.parametrize("axis", ["iteration", "seconds"])
def test_several_runs_are_drawn_into_one_figure(tmp_path: Path, axis: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text("".join(LINES))
    runs = [str(tmp_path / "a.log"), str(tmp_path / "b.log")]
    figure = tmp_path / "new" / "loss.png"
    options = ["--labels", "Shampoo", "AdamW", "--axis", axis, "--smooth", "2", "--line", "ln 1024", "6.93"]
    assert plot_log.main([*runs, "--output", str(figure), *options]) == 0
    assert figure.read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert "Shampoo: 3 log lines to iteration 10, loss 6.9000 to 5.5000, validation 5.7500, 17.0 s" in printed


def test_the_figure_shows_every_curve_line_and_validation_point(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(LINES))
    curve = read_curve(tmp_path / "a.log", "mine")
    draw([curve, curve], tmp_path / "loss.svg", lines={"ln 1024": 6.931})
    drawn = (tmp_path / "loss.svg").read_text()
    for text in ("mine", "mine, validation", "ln 1024 = 6.93", "iteration", "loss (nats per token)"):
        assert f"<!-- {text} -->" in drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--labels", "one", "two"], "2 names for 1 runs"),
        (["--smooth", "0"], "--smooth 0: at least 1"),
        (["--line", "entropy", "high"], "--line"),
    ],
)
def test_bad_options_of_the_plot_are_named(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plot_log.main([str(tmp_path / "a.log"), *options])
    assert message in capsys.readouterr().err


def test_a_run_without_losses_fails_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_log.main([str(tmp_path / "a.log"), "--output", str(tmp_path / "loss.png")]) == 1
    assert f"error: {tmp_path / 'a.log'}" in capsys.readouterr().err
    assert not (tmp_path / "loss.png").exists()


def test_a_figure_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text("".join(LINES))
    assert plot_log.main([str(tmp_path / "a.log"), "--output", str(tmp_path / "loss.nonsense")]) == 1
    assert "loss.nonsense" in capsys.readouterr().err
