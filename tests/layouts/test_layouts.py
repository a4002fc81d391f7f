"""One training run, whatever the layout: losses, gradient norms and parameters of the real `pretrain_gpt.py`.

`make layouts` runs every case and writes the table; `make test` runs those that are marked quick.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch import Launcher
from tests.layouts.cases import CASES, CROWD, FP32, HALF, LATE, MODELS, Case
from tests.layouts.runs import Model, check_collectives, check_grid
from tests.layouts.table import BEGIN, END, PAGE
from tests.tiny import Layout

METHODS = ["soap", "kl-soap", "kl-shampoo", "one-sided"]
"""Beside the default; they take the same route through plan and exchange, so four layouts are enough."""
Models = Callable[[str], Model]


@pytest.fixture(scope="module")
def models(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models by name, each made when it is first asked for."""
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = Model(launcher, MODELS[name], tmp_path_factory.mktemp("model"))
        return made[name]

    return model


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The case; only quick ones without `--all-layouts`."""
    found: Case = request.param
    if not found.quick and not request.config.getoption("all_layouts"):
        pytest.skip("runs in `make layouts`")
    return found


def within(worst: dict[str, float], tolerances: dict[str, float], factor: float = 1.0) -> bool:
    """Whether losses and gradient norms are within tolerances, and parameters within `factor` times theirs."""
    bounds = tolerances | {"parameter": factor * tolerances["parameter"]}
    return all(worst[name] <= bounds[name] for name in bounds)


@pytest.mark.parametrize("case", CASES, ids=str, indirect=True)
def test_the_run_does_not_depend_on_the_layout(
    models: Models, case: Case, record_property: Callable[[str, object], None]
) -> None:
    model = models(case.model)
    record_property("case", str(case))
    result = model.train(case.layout, case.probe, *case.settings, *case.flags)
    worst = model.worst(result, *case.settings, probe=case.probe, matrices_only=case.is_half)
    alone = model.alone(*case.settings, probe=case.probe)
    record_property("alone", [alone.losses[-1], alone.grad_norms[0]])
    record_property("measured", [result.losses[-1], result.grad_norms[0], worst])
    record_property("bytes", check_collectives(result, case.layout))
    check_grid(result, alone)
    assert within(worst, case.tolerances), worst
    if case.label == CROWD:
        assert any(not ours["owned"] for it in result.records for ours in it["setup"]["optimizers"].values())


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(dp=3), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_run_on_every_layout(models: Models, method: str, layout: Layout) -> None:
    flags = ("--shampoo-method", method, "--shampoo-refresh-interval", "3")
    result = models("GPT").train(layout, "count", *flags)
    worst = models("GPT").worst(result, *flags)
    print(f"{method} {layout}: {worst}")
    assert within(worst, FP32, 2.0), worst
    check_collectives(result, layout)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=3), Layout(dp=2, distributed=False)], ids=str)
@pytest.mark.parametrize("start_step", ["1", "3"])
def test_momentum_after_preconditioning_too(models: Models, start_step: str, layout: Layout) -> None:
    """One payload travels to the owners instead of two, or grafting steps before the start step."""
    flags = ("--shampoo-momentum-placement", "after", "--shampoo-nesterov", "--shampoo-start-step", start_step)
    result = models("GPT").train(layout, "count", *flags)
    worst = models("GPT").worst(result, *flags)
    assert within(worst, FP32, 5.0), worst
    check_collectives(result, layout)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("model", ["GPT", "Llama"])
def test_with_the_default_schedule_too(models: Models, model: str, layout: Layout) -> None:
    """The root of the very first gradient, of a nearly singular factor, amplifies rounding in the parameters more."""
    worst = models(model).worst(models(model).train(layout, None))
    assert within(worst, FP32, 5.0), worst


# -- negative controls: the comparison sees what it is there for


def test_soap_without_damping_is_another_run_on_every_layout(models: Models) -> None:
    """Without the damping Adam in the basis brings rounding errors to full size."""
    flags = ("--shampoo-method", "soap", "--shampoo-solver", "eigh", "--shampoo-epsilon", "1e-30")
    worst = models("GPT").worst(models("GPT").train(Layout(dp=3), None, *flags), *flags)
    assert worst["loss"] > FP32["loss"] and worst["gradient norm"] > 10 * FP32["gradient norm"], worst


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(dp=2), ()),
        (Layout(cp=2), ()),
        (Layout(dp=4, instances=2), ()),
        (Layout(dp=2), ("--overlap-grad-reduce", "--overlap-param-gather")),
        (Layout(dp=3), ("--shampoo-ownership", "balanced")),
    ],
    ids=["DP2", "CP2", "2 instances", "overlap", "balanced owners"],
)
def test_a_dropped_fragment_is_seen(models: Models, layout: Layout, flags: tuple[str, ...]) -> None:
    """One fragment of one cut block is lost on its way to the owner."""
    result = models("GPT").train(layout, "drop_fragment", *LATE, *flags)
    worst = models("GPT").worst(result, *LATE)
    assert worst["parameter"] > 10 * FP32["parameter"], worst
    assert worst["loss"] > FP32["loss"] or worst["gradient norm"] > FP32["gradient norm"], worst


def test_a_dropped_fragment_is_seen_in_bf16(models: Models) -> None:
    settings = (*LATE, "--bf16")
    result = models("GPT").train(Layout(dp=2), "drop_fragment", *settings)
    worst = models("GPT").worst(result, *settings, matrices_only=True)
    assert not within(worst, HALF), worst


@pytest.mark.parametrize(
    ("model", "layout"), [("GPT", Layout(pp=2)), ("MoE", Layout(dp=2, ep=2))], ids=["layers", "experts"]
)
def test_refresh_turns_that_depend_on_the_rank_are_seen(models: Models, model: str, layout: Layout) -> None:
    """Layers or experts numbered from the first that a rank holds."""
    settings = (*LATE, "--shampoo-refresh-interval", "5")  # 3 divides an expert's number of blocks
    worst = models(model).worst(models(model).train(layout, "number_units_by_rank", *settings), *settings)
    assert not within(worst, FP32), worst


def test_another_alignment_is_another_run(models: Models) -> None:
    """With another alignment the blocks are others, and so is the run."""
    other = ("--shampoo-tp-alignment", "1", "--shampoo-block-size", "64")
    worst = models("GPT").worst(models("GPT").train(Layout(), None, *LATE, *other), *LATE)
    assert worst["parameter"] > 10 * FP32["parameter"], worst


# -- the page


def test_the_page_has_every_case(request: pytest.FixtureRequest) -> None:
    """`make layouts LAYOUTS=--layout-docs` renews it; all of its rows say that the run is the same."""
    if request.config.getoption("layout_docs"):
        pytest.skip("this run writes the table when it ends")
    rows = [line.split(" | ") for line in PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines() if "|" in line]
    verdicts = {(row[0].removeprefix("| "), row[1]): row[-1].removesuffix(" |") for row in rows[2:]}
    assert {key for key, verdict in verdicts.items() if verdict == "same"} == {
        (case.group, case.name) for case in CASES
    }
