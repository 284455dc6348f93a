"""A law through small runs: from losses that are known, and once through runs of the real path."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from gptrain.core import locations
from gptrain.core.errors import ConfigError
from gptrain.ladder import law as module
from gptrain.ladder import report, runs
from gptrain.ladder.__main__ import main
from gptrain.ladder.law import (
    NAMES,
    Law,
    count_constants,
    count_parameters,
    find_best_size,
    fit,
    fit_law,
    law_loss,
    predict_largest,
)
from gptrain.ladder.report import conclude, duration, plan_table, summary_lines, table_rows
from gptrain.ladder.runs import check_same, train_size
from gptrain.ladder.sizes import (
    Phases,
    carried_lr,
    find_phases,
    replace_overrides,
    scaled,
    warn,
)
from tests.command_line import compose_run
from tests.conftest import ROOT, TINY

pytestmark = pytest.mark.engine("scipy", "matplotlib")

TRUTH = np.array([1.69, 406.4, 0.34, 410.7, 0.28])  # Hoffmann et al. 2022: E, A, a, B, b
SIZES, EACH = np.array([1e7, 3e7, 1e8, 3e8, 1e9]), np.array([5.0, 10.0, 20.0, 40.0])


def runs_of(truth, noise=0.0, seeds=1, sizes=SIZES, each=EACH, seed=0):
    """Return N, D and the loss of a run for each size, number of tokens and seed."""
    n = np.repeat(sizes, len(each) * seeds)
    d = n * np.tile(np.repeat(each, seeds), len(sizes))
    drawn = np.random.default_rng(seed).normal(0, 1, len(n))
    return n, d, law_loss(truth, n, d) * np.exp(noise * drawn)


def test_a_law_without_noise_is_found_again():
    """L-BFGS stops at an error of 1e-3 in an exponent."""
    law = fit(*runs_of(TRUTH))
    assert law[[2, 4]] == pytest.approx(TRUTH[[2, 4]], abs=1e-3)
    assert law[0] == pytest.approx(TRUTH[0], rel=1e-3)


def test_exponents_and_an_extrapolation_are_found_in_noise(monkeypatch):
    """Noise of 0.1 % of the loss, 60 runs: exponents to 0.05, four times the size to 0.5 %."""
    monkeypatch.setattr(module, "N_BOOTSTRAP", 60)
    truth = np.array([0.8, 30.0, 0.25, 2000.0, 0.4])
    law = fit_law("all", *runs_of(truth, noise=1e-3, seeds=3))
    assert law.named.keys() == set(NAMES[5])
    assert np.array(law.constants)[[2, 4]] == pytest.approx(truth[[2, 4]], abs=0.05)
    n, d = 4e9, 8e10
    real = law_loss(truth, n, d)
    assert law.loss(n, d) == pytest.approx(real, rel=5e-3)
    low, high = law.interval(n, d)
    assert low < real < high < 1.02 * low


def test_one_run_that_failed_moves_the_law_little():
    """Huber's cost grows with the residual, not with its square."""
    n, d, loss = runs_of(TRUTH)
    loss[7] *= 1.5
    assert law_loss(fit(n, d, loss), 4e9, 8e10) == pytest.approx(
        law_loss(TRUTH, 4e9, 8e10), rel=0.01
    )


def test_both_laws_have_the_values_worked_out_by_hand():
    """1 + 8 / 16^(1/2) + 27 / 27^(1/3) is 1 + 2 + 9, and 6 / (16 * 4)^(1/2) is 6 / 8."""
    assert law_loss([1, 8, 1 / 2, 27, 1 / 3], 16, 27) == pytest.approx(12)
    assert law_loss([6, 1 / 2], 16, 4) == pytest.approx(0.75)


def test_an_interval_is_that_of_the_level_of_its_noise():
    """Noise spread evenly from -1 to 1 lies to 95 % between -0.95 and 0.95."""
    log = np.log(0.75)
    law = Law("all", [6, 0.5], [[6, 0.5]] * 201, np.linspace(-1, 1, 201).tolist())
    assert np.log(law.interval(16, 4)) == pytest.approx([log - 0.95, log + 0.95])


def test_the_noise_of_a_law_makes_up_for_its_degrees_of_freedom():
    """Two constants of eight runs: a residual is smaller than the noise by (6/8)^(1/2)."""
    n, d, _ = runs_of(TRUTH, sizes=SIZES[:2])
    loss = 7.0 * (n * d) ** -0.1 * np.exp([0.01, -0.02, 0.03, 0.0, 0.02, -0.01, -0.03, 0.01])
    law = fit_law("all", n, d, loss)
    x = np.log(n * d)
    residuals = np.log(loss) - np.polyval(np.polyfit(x, np.log(loss), 1), x)
    expected = np.sqrt(8 / 6) * residuals
    assert len(law.constants) == 2 and len(law.samples) == len(law.noise) == 200
    assert max(law.noise) == pytest.approx(expected.max(), rel=1e-6)
    assert min(law.noise) == pytest.approx(expected.min(), rel=1e-6)


def test_a_plan_of_three_seeds_takes_three_times_what_one_takes():
    rows, totals = {}, {}
    size = SimpleNamespace(
        n_devices=2, step_tokens=64, flops_per_token=1e6, counts={"all": 5000}, words=[],
        hours=lambda n_tokens: n_tokens / 6400,
    )  # fmt: skip
    for n_seeds in (1, 3):
        text = plan_table([size, size], [SimpleNamespace(steps=700)] * 2, n_seeds, size, 1e3, "h")
        rows[n_seeds] = text.splitlines()[1]
        totals[n_seeds] = next(line for line in text.splitlines() if line.startswith("ladder"))
    assert "1 x 700  7.0 h" in rows[1]
    assert "3 x 700  21.0 h" in rows[3]
    assert totals[1] == "ladder    8.96e+10 FLOPs, 14.0 h on 2 x this machine"
    assert totals[3] == "ladder    2.69e+11 FLOPs, 42.0 h on 2 x this machine"


def test_the_law_counts_what_predicts_the_largest_size_and_finds_the_best_size_by_it(
    tmp_path, monkeypatch
):
    """The losses are those of a power law of the parameters outside of tables, without noise."""
    from matplotlib.figure import Figure

    n_matrices, n_tables = (
        (10**5, 4 * 10**5, 2 * 10**6, 10**7),
        (3 * 10**5, 5 * 10**5, 8 * 10**5, 2 * 10**6),
    )
    *sizes, target = (
        SimpleNamespace(
            counts={"all": n + table, "matrices": n, "blocks": n**1.3},
            flops_per_token=per_weight * n, n_devices=8, words=[],
            hours=lambda n_tokens: n_tokens / 1e9,
        )
        for n, table, per_weight in zip(n_matrices, n_tables, (6, 6, 6, 3), strict=True)
    )  # fmt: skip
    points = [
        {"parameters": size.counts, "tokens": d, "seed": seed,
         "loss": 7.0 * (size.counts["matrices"] * d) ** -0.1}
        for size in sizes
        for d, seed in ((10**7, 4), (3 * 10**7, 5))
    ]  # fmt: skip
    options = SimpleNamespace(count="auto", budget=1e14)
    facts = conclude(options, points, sizes, target, 4e8)
    assert facts["law"].count == "matrices"
    assert facts["target"]["loss"] == pytest.approx(7.0 * (1e7 * 4e8) ** -0.1)
    assert facts["target"]["level"] == 0.95 and facts["points"] == points
    assert (facts["target"]["flops"], facts["target"]["hours"]) == (3 * 1e7 * 4e8, 0.4)
    best = facts["best"]
    # The target, which takes the fewest FLOPs for each parameter and token, is a known size, too.
    assert 3 * best["parameters"] * best["tokens"] == pytest.approx(1e14)
    assert facts["target"]["interval"] == pytest.approx([facts["target"]["loss"]] * 2)  # no noise
    assert best["interval"] == pytest.approx([best["loss"]] * 2)
    facts["left_out"]["matrices"] |= {"predicted": 2.0, "measured": 2.5}
    facts["points"][0]["loss"] *= 2
    lines = summary_lines({**facts, "target": facts["target"] | {"place": "8 x h100_sxm"}})
    assert lines[0].startswith("law       L = 7 (N D)^-0.1, as the runs are too few for a law of ")
    assert lines[0].endswith("; N: parameters without tables that are looked up")
    assert "left out  the largest: 2.0000, measured 2.5000 (-20.00%), by a plain power" in lines[1]
    errors = {name: left_out["error"] for name, left_out in facts["left_out"].items()}
    assert lines[1].endswith(
        f"; mean error by what N counts: all {errors['all']:.2%}, matrices 0.00%, "
        f"blocks {errors['blocks']:.2%}"
    )
    assert lines[3].startswith(
        f"best      for 1e+14 FLOPs: {best['parameters']:.3g} parameters, {best['tokens']:.3g} "
        f"tokens: loss {best['loss']:.4f} (95%: "
    )
    assert lines[2].startswith("target    12,000,000 parameters, 4e+08 tokens: loss 0.1927 (95%: ")
    assert lines[2].endswith(", 1.2e+16 FLOPs, 24.0 min on 8 x h100_sxm")
    assert [row[-1] for row in table_rows(facts)[:2]] == ["off", "-50.00%"]
    loss = f"{points[3]['loss']:.4f}"
    assert table_rows(facts)[4][:5] == ["900,000", "30,000,000", "5", loss, loss]
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    report.draw(tmp_path / "a.png", facts | {"target": facts["target"] | {"place": "here"}})
    axes = figures[0].axes[0]  # every other line has the runs of the size
    for curve, interval, n in zip(axes.lines[::2], axes.collections, n_matrices, strict=True):
        for x, y in (curve.get_data(), interval.get_paths()[0].vertices.T):
            assert y == pytest.approx(7.0 * (n * x) ** -0.1, rel=1e-3)
    monkeypatch.setattr(report, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command = {"place": "8 x h100_sxm", "command": "python train.py"}
        report.write(tmp_path, facts | {"target": facts["target"] | command})
    # The numbers outlive a picture that cannot be drawn.
    assert json.loads((tmp_path / "ladder.json").read_text())["best"]["flops"] == 1e14
    fixed = conclude(SimpleNamespace(count="all", budget=None), points, sizes, target, 4e8)
    assert fixed["law"].count == "all" and "best" not in fixed


def test_the_runs_of_a_size_share_a_stable_phase_with_a_checkpoint_before_each_decay():
    """5 tokens for each of 1000 parameters are 500 steps, of which a fifth decays.

    Stable phases of all runs end at checkpoints: at multiples of the common divisor.
    """
    cfg = compose_run("scheduler=warmup_stable_decay")
    for counts, keys, expected in (
        ([5, 10, 20], {}, Phases(50, 400, [400, 800, 1600], [500, 1000, 2000])),
        ([4, 6], {}, Phases(40, 160, [320, 480], [400, 600])),
        ([4, 6], {"decay_steps": 0.5}, Phases(40, 100, [200, 300], [400, 600])),
        ([4, 6], {"decay_steps": 30}, Phases(40, 160, [320, 480], [400, 600])),
        ([4, 6], {"decay_steps": 1}, Phases(40, 160, [320, 480], [400, 600])),
        ([0.02, 0.04], {}, Phases(0, 2, [2, 4], [4, 6])),  # a step of decay, and one at its end
        ([4, 6], {"warmup_tokens": 300}, Phases(30, 160, [320, 480], [400, 600])),
    ):
        changed = cfg.changed({f"scheduler.{key}": value for key, value in keys.items()})
        size = SimpleNamespace(cfg=changed, counts={"all": 1000}, step_tokens=10)
        phases = find_phases(size, counts)
        assert phases == expected
        assert phases.steps == sum(expected.total) - sum(expected.stable) + expected.stable[-1]
    for warmup, is_refused in ((399, False), (400, True)):
        changed = cfg.changed({"scheduler.warmup_steps": warmup})
        size = SimpleNamespace(cfg=changed, counts={"all": 1000}, step_tokens=10)
        message = r"tokens_per_parameter=5: 1,000 parameters warm up for 400 of 400 steps; try: "
        with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
            assert find_phases(size, [5, 10]).warmup == 399


def test_a_smaller_model_keeps_the_width_of_a_head_and_the_queries_of_each_key():
    """A third of eight heads, two for each key head, of width 8, is two heads."""
    sizes = {"n_layers": 10, "d_model": 64, "n_heads": 8, "n_kv_heads": 4, "d_ff": 170}
    cfg = SimpleNamespace(model=SimpleNamespace(arguments=sizes))
    assert scaled(cfg, 0.3) == [
        "model.n_layers=3", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1",
        "model.d_ff=40",
    ]  # fmt: skip
    del sizes["n_heads"]
    message = r"ladder\.sizes=0\.3: the model group has no n_layers, n_heads and d_model to scale"
    with pytest.raises(ConfigError, match=message):
        scaled(cfg, 0.3)


def test_a_learning_rate_is_carried_over_by_width_unless_the_size_has_its_own():
    sizes = {"d_model": 16}
    cfg = SimpleNamespace(
        optimizer=SimpleNamespace(lr=1e-3), model=SimpleNamespace(arguments=sizes)
    )
    assert carried_lr(cfg, ["model.d_model=16"], "sqrt_width", 64) == 2e-3
    assert carried_lr(cfg, ["+optimizer.lr=1e-3"], "sqrt_width", 64) is None
    assert carried_lr(cfg, [], "constant", 64) is None
    sizes.clear()
    with pytest.raises(ConfigError, match=r"ladder\.lr_rule=sqrt_width: the model group"):
        carried_lr(cfg, [], "sqrt_width", 64)


def test_runs_that_repeat_their_data_or_have_few_steps_are_warned_about(capsys):
    small, large = (
        SimpleNamespace(counts={"all": n}, epoch_tokens=1000.0 * n_epochs)
        for n, n_epochs in ((100, 1), (300, 2))
    )
    warn([small, large], fewest_steps=100, tokens_per_parameter=6)
    assert capsys.readouterr().err == ""
    warn([small, large], fewest_steps=99, tokens_per_parameter=20)
    few, again = capsys.readouterr().err.splitlines()
    assert "the smallest net has 99 steps" in few
    assert "the largest net trains on the same data 3.0 times" in again


# Records its start and its words, and ends as a run does that has trained.
SCRIPT = """
import json, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(words["run_dir"])
with open(folder.parent / "started", "a") as file:
    file.write(folder.name + " ")
(folder / ".hydra").mkdir(parents=True, exist_ok=True)
(folder / ".hydra" / "overrides.yaml").write_text(json.dumps(sys.argv[1:]))
if words["trainer.max_steps"] == "100":
    sys.exit(failure)
(folder / "result.json").write_text(json.dumps({"metrics": {"val/loss": 2.5}}))
sys.exit()
"""


@pytest.mark.parametrize(("failure", "code"), [("75", 75), ("'a message'", 70)])
def test_the_longest_run_comes_first_and_a_run_that_fails_ends_the_sweep(tmp_path, failure, code):
    """The other runs start from its checkpoints. A run that is done is not started again."""
    script, folder = tmp_path / "train.py", tmp_path / "ladder" / "1000"
    size = SimpleNamespace(words=["model.n_layers=1"], counts={"all": 1000}, step_tokens=10)
    phases = Phases(5, every=40, stable=[40, 80, 160], total=[50, 100, 200])
    typed = ["model=gpt_nano", "model.n_layers=7", "scheduler.decay_steps=0.5"]
    options = ("val/loss", size, phases, 3, [0.5, 1, 2])
    script.write_text(SCRIPT.replace("failure", failure))
    folder.mkdir(parents=True)
    argv = sys.argv
    with pytest.raises(SystemExit) as left:
        train_size(folder.parent, script, typed, *options)
    assert left.value.code == code and sys.argv == argv
    script.write_text(SCRIPT.replace("    sys.exit(failure)", "    pass"))
    for _ in range(2):
        points = train_size(folder.parent, script, typed, *options)
    assert (folder / "started").read_text() == "seed-3-2 seed-3-1 seed-3-1 seed-3-0.5 "
    assert [(point["tokens"], point["seed"], point["loss"]) for point in points] == [
        (500, 3, 2.5), (1000, 3, 2.5), (2000, 3, 2.5),
    ]  # fmt: skip
    longest, short = (
        {*json.loads((folder / f"seed-3-{n}" / ".hydra" / "overrides.yaml").read_text())}
        for n in (2, 1)
    )
    assert longest > {
        "model.n_layers=1", "trainer.max_steps=200", "scheduler.decay_steps=39", "seed=3",
        "scheduler.warmup_steps=5", "trainer.val_check_interval=40", "checkpoint.keep=7",
        "ckpt_path=last", "checkpoint=default", "scheduler=warmup_stable_decay", "task=fit",
        # The number of steps alone ends a run.
        "max_tokens=null", "trainer.max_epochs=-1", "trainer.max_time=null",
        "scheduler.total_steps=null", "scheduler.total_tokens=null",
        "scheduler.warmup_tokens=null", "scheduler.decay_tokens=null",
    }  # fmt: skip
    assert short > {
        "model.n_layers=1", "trainer.max_steps=100", "scheduler.decay_steps=19", "seed=3",
        "trainer.val_check_interval=100", "allow_changes=[scheduler]",
        f"ckpt_path={folder}/seed-3-2/checkpoints/step-00000080",
    }  # fmt: skip
    # A short run that was interrupted resumes from its own checkpoint. With another length in the
    # sweep the longest run has more checkpoints, and is not run again for that.
    shortest = folder / "seed-3-0.5"
    (shortest / "result.json").unlink()
    (shortest / "checkpoints" / "step-00000045").mkdir(parents=True)
    options = ("val/loss", size, replace(phases, every=20), 3, [0.5, 1, 2])
    assert train_size(folder.parent, script, typed, *options) == points
    assert (folder / "started").read_text().split()[4:] == ["seed-3-0.5"]
    assert "ckpt_path=last" in (shortest / ".hydra" / "overrides.yaml").read_text()
    message = "objective=val/acc: .*seed-3-2: the run did not log this metric; allowed: .*val/loss"
    with pytest.raises(ConfigError, match=message) as error:
        train_size(folder.parent, script, typed, "val/acc", *options[1:])
    assert error.value.code == 65


def test_too_few_runs_give_a_straight_line(monkeypatch):
    n, d, _ = runs_of(TRUTH, sizes=SIZES[:2])
    assert count_constants(n, d) == 2 and count_constants(*runs_of(TRUTH)[:2]) == 5
    law = fit_law("all", n, d, 7.0 * (n * d) ** -0.1)
    assert law.named == pytest.approx({"A": 7.0, "a": 0.1})
    assert law.interval(1e9, 1e10) == pytest.approx([7.0 * 1e19**-0.1] * 2)
    # Of nine runs, a sample often has too few different ones for five constants.
    monkeypatch.setattr(module, "N_BOOTSTRAP", 5)
    law = fit_law("all", *runs_of(TRUTH, noise=1e-3, sizes=SIZES[:3], each=EACH[:3]))
    assert np.shape(law.samples) == (5, 5)


def test_the_largest_size_is_predicted_without_it():
    n, d, loss = runs_of(TRUTH)
    prediction = predict_largest(n, d, np.where(n == n.max(), 1.1 * loss, loss))
    assert prediction["error"] == pytest.approx(np.log(1.1), abs=2e-3)
    assert prediction["measured"] / prediction["predicted"] == pytest.approx(1.1, rel=2e-3)
    assert prediction["measured"] == pytest.approx(1.1 * loss.min())  # the longest run counts


def test_the_best_size_for_a_budget_is_that_of_the_closed_form():
    """Hoffmann et al., equation 4, where a token takes 6 N FLOPs."""
    law = Law("all", TRUTH.tolist(), [], [])
    _, A, a, B, b = TRUTH
    best = (a * A / (b * B)) ** (1 / (a + b)) * (1e21 / 6) ** (b / (a + b))
    n, d = find_best_size(law, 1e21, SIZES, 6 * SIZES)
    assert n == pytest.approx(best, rel=0.02)
    assert 6 * n * d == pytest.approx(1e21, rel=1e-6)


def test_a_duration_of_any_length_is_formatted():
    texts = [duration(hours) for hours in (0.01, 0.5, 3.0, 96.0, 1.9e14 / 3600, float("nan"))]
    assert texts == ["36 s", "30.0 min", "3.0 h", "4.0 d", "2,199,074,074.1 d", "?"]


def test_what_counts_as_a_parameter():
    """A table, a head of its own and a matrix between; then the head tied to the table."""
    net = nn.ModuleList([nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)])
    assert count_parameters(net, 10) == {"all": 100, "matrices": 60, "blocks": 20}
    net[2].weight = net[0].weight
    assert count_parameters(net, 10) == {"all": 60, "matrices": 60, "blocks": 20}


# Beginnings of words for the sweep alone, not for its runs.
OWN = ("ladder.", "hardware", "topology", "run_dir=", "name=")
SMALL = [*TINY, "data=text", f"data.path={ROOT / 'src' / 'gptrain' / 'runs'}", "data.batch_size=1",
         "scheduler.warmup_steps=5", "model.n_heads=4", "ladder.sizes=[0.25,0.5,0.75]",
         "callbacks=none", "logger=none", "ladder.tokens_per_parameter=[0.1,0.2]"]  # fmt: skip


@pytest.fixture
def ladder(typed, tmp_path):
    """Runs the command: exit code, stdout, stderr."""
    return lambda *words: typed(main, *SMALL, f"output_dir={tmp_path}", *words)


def test_the_command_fits_the_law_to_the_runs_of_all_sizes_and_seeds(ladder, tmp_path, monkeypatch):
    """No run is trained: the losses are those of a power law without noise."""
    from matplotlib.figure import Figure

    called, steps = [], []

    def train_size(folder, script, typed, objective, size, phases, seed, counts):
        folder.mkdir(exist_ok=True)
        steps.extend(phases.total)
        assert script == ROOT / "train.py" and not any(word.startswith(OWN) for word in typed)
        called.append((objective, seed, counts))
        tokens = [total * size.step_tokens for total in phases.total]
        n_parameters = size.counts["all"]
        assert tokens == pytest.approx([n * n_parameters for n in counts], rel=0.1)
        return [
            {"parameters": size.counts, "tokens": n_tokens, "seed": seed, "run": "run",
             "tokens_per_parameter": count, "loss": 7 * (size.counts["all"] * n_tokens) ** -0.1}
            for count, n_tokens in zip(counts, tokens, strict=True)
        ]  # fmt: skip

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    monkeypatch.setattr(runs, "train_size", train_size)
    monkeypatch.chdir(ROOT / "conf")  # any folder of the project will do
    words = ("ladder.budget=1e12", "ladder.seeds=[3,5]",
             "ladder.target='model=llama_nano optimizer.lr=0.002 scheduler=warmup_cosine'",
             "name=mine", f"run_dir={tmp_path}/sweep")  # fmt: skip
    code, out, err = ladder(*words, "trainer.devices=2", "ladder.count=all")
    assert code == 0, err
    assert called == [("val/loss", seed, [0.1, 0.2]) for _ in range(3) for seed in (3, 5)]
    assert f"the smallest net has {min(steps)} steps: too few for a law" in err
    folder = tmp_path / "sweep"
    facts = json.loads((folder / "ladder.json").read_text())
    assert len(facts["points"]) == 12 and facts["law"]["count"] == "all"
    assert facts["constants"].keys() == {*NAMES[len(facts["law"]["constants"])]}
    target = facts["target"]
    assert target["tokens"] == 0.2 * target["parameters"]["all"] and target["devices"] == 2
    per_token = 6 * target["parameters"]["matrices"] + 12 * 2 * 32 * 17  # layers, d_model, T
    assert target["flops"] == pytest.approx(target["tokens"] * per_token)
    n = target["parameters"]  # 256 tokens: a table and a head, which are not shared
    assert n["all"] - n["matrices"] == n["matrices"] - n["blocks"] == 256 * 32
    law = 7 * (n["all"] * target["tokens"]) ** -0.1
    assert target["loss"] == pytest.approx(law, rel=1e-3) and target["place"] == "2 x this machine"
    typed = {*shlex.split(target["command"])}
    assert {"scheduler=warmup_stable_decay", "trainer.max_steps=-1", "optimizer.lr=0.002",
            f"max_tokens={target['tokens']:.0f}", "model.d_model=32"} < typed  # fmt: skip
    assert not any(word.startswith(OWN) for word in typed)
    assert sum(word.startswith("scheduler=") for word in typed) == 1
    assert (folder / "ladder.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels[3] == f"target, {n['all'] / 1e6:.3g} M parameters"
    assert [len(line.get_xdata()) for line in axes.lines[1::2]] == [4, 4, 4, 1]  # a size's runs
    *_, files, following = out.splitlines()
    assert files == f"files     {folder}/ladder.json · {folder}/ladder.png"
    assert following == f"next      {target['command']}"
    assert "target    " in out and " on 2 x this machine" in out and "best      for 1e+12" in out


def test_the_target_alone_is_on_the_typed_hardware_and_a_run_that_fails_ends_the_sweep(
    ladder, monkeypatch
):
    """The width of the smaller nets is 16, 32 and 48. The learning rate 3e-4 belongs to 128."""
    begun = []

    def train_size(folder, script, typed, objective, size, phases, seed, counts):
        begun.append((size, seed))
        raise SystemExit(75)

    monkeypatch.setattr(runs, "train_size", train_size)
    words = ["ladder.sizes=[0.5,0.25,0.75]", "ladder.lr_width=128", "trainer.devices=4", "seed=7",
             "model.n_heads=8", "model.d_model=64", "strategy=fsdp_tensor_parallel",
             "ladder.target='max_tokens=7e6 trainer.max_steps=-1'"]  # fmt: skip
    pairs = ROOT / "tests" / "topologies" / "pairs.txt"
    outs = []
    for place in ([], ["hardware=h100_sxm", f"topology={pairs}"]):
        code, out, err = ladder(*words, *place)
        assert code == 75, err
        outs.append(out.splitlines())
    assert [seed for _, seed in begun] == [7, 7]
    size = begun[0][0]
    assert size.row == begun[1][0].row  # the smaller nets train on this machine
    n_bytes = sum(path.stat().st_size for path in (ROOT / "src/gptrain/runs").glob("*.*"))
    assert size.epoch_tokens == pytest.approx(0.95 * n_bytes, rel=0.05)  # the rest is validated
    assert size.step_tokens == 2 * 17  # four ranks are two groups that share their layers
    header, *table, total, _ = outs[0]
    assert outs[1][:-1] == [header, *table, total] and total.endswith(" on 4 x this machine")
    rates = ("0.000848528", "0.0006", "0.000489898")
    for row, width, lr in zip(table, (16, 32, 48), rates, strict=True):
        assert f"model.d_model={width} " in row and row.endswith(f" optimizer.lr={lr}")
    for lines, place in zip(outs, ("this machine", "h100_sxm"), strict=True):
        assert " parameters, 7e+06 tokens, " in lines[-1] and lines[-1].endswith(f" on 4 x {place}")


@pytest.mark.slow
def test_a_ladder_predicts_a_loss_and_repeats_only_missing_runs(ladder, tmp_path):
    words = ("hardware=h100_sxm", "ladder.lr_width=128", "max_tokens=7e6", "trainer.max_steps=-1")
    code, out, err = ladder("--plan", *words, "trainer.devices=1", "trainer.num_nodes=2")
    assert code == 0, err
    assert " 7e+06 tokens, " in out and " on 2 x h100_sxm" in out and "2 x this machine" in out
    assert "run  " not in out and "h100_sxm" in out and not (tmp_path / "ladder").exists()
    assert "optimizer.lr=0.0012" in out.splitlines()[1]  # 3e-4 * (128 / 8)^(1/2)
    here = ladder("--plan", *words[1:], "trainer.devices=1", "trainer.num_nodes=2")[1]
    same = [line in out for line in here.splitlines()]  # the target alone is on the H100
    assert same == [True] * (len(same) - 1) + [False]
    code, out, err = ladder("ladder.budget=1e12", "seed=3", "ladder.target='optimizer.lr=0.002'")
    assert code == 0, err
    assert sys.argv[0] == "command"  # the runs have had their own words
    folder = tmp_path / "ladder"
    facts = json.loads((folder / "ladder.json").read_text())
    assert len(facts["points"]) == 6 and out.count("\nrun  ") == 6
    for point in facts["points"]:
        assert point["seed"] == 3 and "/seed-3-" in point["run"]
        result = json.loads((tmp_path / point["run"] / "result.json").read_text())
        assert result["metrics"]["val/loss"] == point["loss"]
        assert result["tokens"] == point["tokens"]
        each = point["tokens"] / point["parameters"]["all"]
        assert each == pytest.approx(point["tokens_per_parameter"], rel=0.05)
    shortest = json.loads((tmp_path / facts["points"][0]["run"] / "result.json").read_text())
    assert f"the smallest net has {shortest['steps']} steps: too few for a law" in err
    target = facts["target"]
    low, high = target["interval"]
    assert low <= target["loss"] <= high and f"loss {target['loss']:.4f}" in out
    assert target["tokens"] == pytest.approx(0.2 * target["parameters"]["all"])
    words = shlex.split(target["command"])
    assert {"scheduler=warmup_stable_decay", "trainer.max_steps=-1", "model.d_model=32",
            f"max_tokens={target['tokens']:.0f}", "optimizer.lr=0.002"} < {*words}  # fmt: skip
    # A short run starts from a checkpoint of the longest run of its size.
    for short, longest in zip(facts["points"][::2], facts["points"][1::2], strict=True):
        overrides = (tmp_path / short["run"] / ".hydra" / "overrides.yaml").read_text()
        assert f"ckpt_path={tmp_path / longest['run']}/checkpoints/step-" in overrides
    # One run is lost, and only that is run again, to the same loss.
    lost = facts["points"][2]
    (tmp_path / lost["run"] / "result.json").unlink()
    (tmp_path / lost["run"] / "status.json").write_text('{"exit_code": 75}')
    code, out, err = ladder("ladder.count=matrices", "seed=3")
    assert code == 0, err
    assert out.count("\nrun  ") == 1
    assert "ckpt_path=last" in (tmp_path / lost["run"] / ".hydra" / "overrides.yaml").read_text()
    again = json.loads((folder / "ladder.json").read_text())
    assert again["points"] == facts["points"]
    code, out, err = ladder("optimizer.betas=[0.8,0.9]", "seed=3")
    assert code == 73 and "optimizer.betas" in err, err


@pytest.mark.parametrize("changed", ["data.image_dir=/b", "from_run={}/other", "optimizer.lr=2e-3"])
def test_a_finished_run_is_used_again_with_the_same_options_alone(tmp_path, changed):
    def write(run_dir, overrides):
        (run_dir / ".hydra").mkdir(parents=True)
        (run_dir / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))

    for name in ("old", "other"):
        write(tmp_path / name, ["model=gpt_nano"])
    words = ["data.image_dir=/a", "optimizer.lr=1e-3", "~optimizer.betas"]
    typed, run_dir = [f"from_run={tmp_path}/old", *words], tmp_path / "1000" / "seed-0-5"
    write(run_dir, ["model=gpt_nano", *typed, "run_dir=/x"])  # train.py writes these words
    elsewhere = ["optimizer.lr=0.001", "run_dir=/y", "ckpt_path=last", "logger=csv"]
    check_same(tmp_path, run_dir, replace_overrides(typed, elsewhere))
    changed = changed.format(tmp_path)
    with pytest.raises(ConfigError, match=f" {changed};"):
        check_same(tmp_path, run_dir, replace_overrides(typed, [changed]))


def test_a_ladder_that_cannot_be_is_refused(ladder, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "train_size", lambda *_: pytest.fail("a run was started"))
    allowed = ("ladder.seeds=[0,2]", "ladder.tokens_per_parameter=[0.1]")
    code, _, err = ladder("ladder.sizes=[0.25,0.26]", *allowed)
    assert code == 2 and "as another" in err
    refused = ("ladder.sizes=[0.5]", "ladder.seeds=[-1]", "ladder.tokens_per_parameter=[]",
               "ladder.budget=-1")  # fmt: skip
    for words in (refused, ["ladder.sizes=[0,0.5]"], ["ladder.sizes=[0.5,101]"]):
        code, _, err = ladder(*words)
        assert code == 2 and all(f"error: {word.partition('=')[0]}" in err for word in words)
    code, _, err = ladder("ladder.tokens_per_parameter=[0.1,0.001]")
    assert code == 2 and "ladder.tokens_per_parameter" in err and "0.01" in err
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        code, _, err = ladder()
        assert code == 2 and err.endswith("; try: pip install matplotlib\n")
    code, _, err = ladder("ladder.sizes=[0.5,'model.n_heads=3']")
    assert code == 2 and "error: model.d_model=32: not divisible by model.n_heads=3" in err
    with monkeypatch.context() as outside:
        outside.setattr(locations, "find_project", lambda: None)
        outside.chdir(tmp_path)
        code, _, err = ladder()
    assert code == 66 and f"error: {tmp_path}/train.py: missing; the runs of the sweep" in err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = ladder()
    assert code == 2 and not out and "\nerror: the command starts its runs itself; " in err
    assert not (tmp_path / "ladder").exists()
