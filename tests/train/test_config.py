"""The config of a run: what it refuses, and what a resumed run may change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmnnx.inspect.schedules import by_name
from mmnnx.mpmd.ir.timeline import UNIT_COSTS
from mmnnx.train import TrainConfig
from mmnnx.train.cli import parse
from mmnnx.train.config import DEVICES, Schedule
from mmnnx.train.errors import UserError
from mmnnx.train.run_folder import RunFolder
from mmnnx.train.step import with_schedule
from tests.slow import examples


def test_defaults_are_valid():
    TrainConfig().validate()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(learning_rate=float("inf")), "--learning-rate must be finite, not inf"),
        (dict(steps=0), "--steps must be above zero, not 0"),
        (dict(learning_rate=float("nan")), "--learning-rate must be finite, not nan"),
        (dict(weight_decay=float("inf")), "--weight-decay must be finite, not inf"),
        (dict(weight_decay=float("nan")), "--weight-decay must be finite, not nan"),
        (dict(clip=float("inf")), "--clip must be finite, not inf"),
        (dict(ema=float("nan")), "--ema must be finite, not nan"),
        (dict(warmup=-1), "--warmup must not be below zero, not -1"),
        (dict(ema=1.0), "--ema must be 0 or more and below 1, not 1.0"),
        (dict(profile=7, steps=6), "--profile 7 is more than the 6 --steps"),
        (dict(seed=2**32), "--seed must be below 2**32, not 4294967296"),
        (dict(out=Path("gs://bucket/lm")), "--out gs:/bucket/lm: a run is kept on a file system"),
        (dict(checkpoints="s3://bucket/lm"), "--checkpoints s3://bucket/lm: checkpoints are kept on a file"),
        (dict(checkpoints="lm"), "--checkpoints lm is no URL, gs://BUCKET/FOLDER; for a folder give --out"),
        (dict(name="lr=[1e-3]"), "runs/lr=[1e-3]: orbax would take *, ? and [ for a pattern"),
        (dict(batch=10, microbatches=4), "--batch 10 must be a multiple of --microbatches 4"),
        (dict(width=100, heads=8), "--width 100 must be a multiple of --heads 8"),
        (dict(heads=4, kv_heads=3), "--heads 4 must be a multiple of --kv-heads 3"),
        (dict(kv_heads=1, tensor=2), "--kv-heads 1 must be a multiple of --tensor 2"),
        (dict(mlp=255), "--mlp 255 must be a multiple of --tensor 2"),
        (dict(width=36, heads=4), "leaves 9 features a head"),
        (dict(tensor=3, heads=6, width=96, kv_heads=3, mlp=255), "--tensor 3 must divide the 256"),
        (dict(processes=0), "--processes must be above zero, not 0"),
        (
            dict(processes=3),
            f"3 processes cannot share 8 devices ({DEVICES})",
        ),
        (dict(processes=2, stages=1, tensor=1), "2 processes cannot share 1 devices"),
        (dict(processes=2, cluster=True), "--cluster joins processes that were started elsewhere"),
        (dict(data_parallel=4), "--data-parallel 4 does not divide the 2 sequences of a microbatch"),
        (dict(context=3), "--sequence 128 must be a multiple of --context 3"),
        (
            dict(attention="cudnn", context=2),
            "--attention cudnn takes whole sequences, which --context 2 divides: leave one out",
        ),
        (dict(expert=2), "--expert divides the experts of a --model that has some, and there is none"),
        (dict(lora=8), "--lora adds to the layers of a --model, and there is none"),
        (dict(fsdp=True), "--fsdp divides weights among the groups of --data-parallel, and there is one"),
        (dict(stages=9), "--stages 9 is more than there are blocks: --layers 8"),
    ],
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(UserError) as error:
        TrainConfig(**options).validate()
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(batch=10, microbatches=4), "--batch 8 or 12, or --microbatches 2 or 5 would do"),
        (dict(tensor=3, heads=6, width=96, kv_heads=3, mlp=255), "; --tensor 1 would do"),
        (dict(kv_heads=1), "; --kv-heads 2, or --tensor 1 would do"),
        (dict(data_parallel=4), "; --data-parallel 2, or --batch 32, or --microbatches 4 would do"),
        (dict(stages=9), "; --stages 8, or --layers 9 would do"),
        (
            dict(batch=10, microbatches=4, mlp=255),
            "--microbatches 4",
        ),  # two mistakes: no one value mends both
    ],
)
def test_a_refusal_names_the_nearest_that_would_do(options, says):
    with pytest.raises(UserError, match=f"{re.escape(says)}$"):
        TrainConfig(**options).validate()


@pytest.mark.parametrize("options", [dict(tensor=10**7), dict(batch=10**9, microbatches=10**9 + 7)])
def test_what_would_do_is_sought_near_the_value_alone(monkeypatch, options):
    """So that a number with too many digits is refused at once."""
    checked = []
    check = TrainConfig._check
    monkeypatch.setattr(TrainConfig, "_check", lambda config: checked.append(config) or check(config))
    with pytest.raises(UserError, match="must be a multiple"):
        TrainConfig(**options).validate()
    assert len(checked) < 5000


OPTIONS = (
    "batch",
    "microbatches",
    "data_parallel",
    "context",
    "sequence",
    "tensor",
    "stages",
    "layers",
    "width",
    "heads",
    "kv_heads",
)


@examples(200)
@given(st.dictionaries(st.sampled_from(OPTIONS), st.integers(1, 24), max_size=2))
def test_what_a_refusal_proposes_is_accepted_and_nothing_nearer_is(options):
    config = TrainConfig(**options)
    try:
        config.validate()
        return
    except UserError as error:
        text = str(error)
    proposals = text.partition("; ")[2].removesuffix(" would do").split(", or ") if "would do" in text else []
    for option, values in (proposal.removeprefix("--").split(" ", 1) for proposal in proposals):
        field = option.replace("-", "_")
        given = getattr(config, field)
        for value in map(int, values.split(" or ")):
            dataclasses.replace(config, **{field: value}).validate()
            for nearer in range(min(value, given) + 1, max(value, given)):
                with pytest.raises(UserError):
                    dataclasses.replace(config, **{field: nearer})._check()


def test_what_is_fine_tuned_has_a_lower_learning_rate():
    given: list[dict] = [{}, {"model": Path("m")}, {"model": Path("m"), "lora": 8}]
    assert [TrainConfig(**options).peak_rate for options in given] == [4e-3, 2e-5, 2e-4]
    assert TrainConfig(model=Path("m"), learning_rate=1e-3).peak_rate == 1e-3


def test_goes_through_json(tmp_path):
    config = TrainConfig(data=tmp_path / "text", learning_rate=1e-3, tied=True)
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "lm"}'])
def test_json_of_something_else(text):
    with pytest.raises(ValueError):
        TrainConfig.from_json(text)


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"steps": "12"}, "a whole number"),
        ({"data": 3}, "a path"),
        ({"width": 96.5}, "a whole number"),
        ({"seed": None}, "a whole number"),
        ({"clip": "1"}, "a number"),
        ({"tied": 1}, "true or false"),
        ({"schedule": []}, "text"),
    ],
)
def test_json_with_a_value_of_another_type(change, kind):
    values = json.loads(TrainConfig().to_json())
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(value))}, not {kind}$"):
        TrainConfig.from_json(json.dumps(values | change))


def test_json_with_a_whole_number_for_a_float():
    values = json.loads(TrainConfig().to_json())
    assert TrainConfig.from_json(json.dumps(values | {"clip": 2})).clip == 2


def test_paths_are_kept_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    saved = TrainConfig.from_json(TrainConfig(data=Path("text")).to_json())
    assert saved.data == tmp_path / "text"
    TrainConfig(data=Path("text")).check_resumes(saved)


@pytest.mark.parametrize(
    "change",
    [
        dict(steps=500),
        dict(stages=2, tensor=1),
        dict(processes=4),
        dict(cluster=True),
        dict(schedule="gpipe"),
        dict(microbatches=4),
    ],
)
def test_a_resumed_run_may_change_where_and_how_long(change):
    dataclasses.replace(TrainConfig(), **change).check_resumes(TrainConfig())


@pytest.mark.parametrize(
    "change", [dict(width=192), dict(seed=1), dict(batch=32), dict(precision="bfloat16")]
)
def test_a_resumed_run_may_not_change_what_is_computed(change):
    with pytest.raises(UserError, match=f"--{next(iter(change))}"):
        dataclasses.replace(TrainConfig(), **change).check_resumes(TrainConfig())


def toml(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.toml").write_text(text)
    return str(tmp_path / "run.toml")


def test_options_of_a_file_are_below_those_of_the_command_line(tmp_path):
    file = toml(
        tmp_path, 'steps = 7\nlearning-rate = 1\nkv_heads = 4\nscan = true\ndata = "text"\nschedule = "zbv"'
    )
    found = parse(["--config", file, "--steps", "9"])
    expected = dict(steps=9, learning_rate=1, kv_heads=4, scan=True, data=Path("text"), schedule="zbv")
    assert found == TrainConfig(config=Path(file), **expected)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepps = 7", "there is no option 'stepps': is it 'steps'?"),
        ('steps = "7"', "steps is '7', not a whole number"),
        ("lora = 2.5", "lora is 2.5, not a whole number"),
        ("data = 3", "data is 3, not a path"),
        ('schedule = "2f2b"', "schedule is '2f2b'; there are auto, 1f1b, gpipe"),
        ("[run]\nsteps = 7", "there is no option 'run'; options are in no table"),
        ("steps 7", "Expected '=' after a key"),
    ],
)
def test_files_that_are_no_options(tmp_path, text, says):
    with pytest.raises(UserError, match=f"--config .*run.toml: .*{re.escape(says)}"):
        parse(["--config", toml(tmp_path, text)])
    with pytest.raises(UserError, match=r"--config .*none.toml cannot be read"):
        parse(["--config", str(tmp_path / "none.toml")])


def test_a_resumed_run_takes_a_file_above_what_it_had(tmp_path):
    RunFolder.create(TrainConfig(out=tmp_path / "run", steps=5, width=64))
    file = toml(tmp_path, f'resume = true\nsteps = 8\nout = "{tmp_path}/run"')
    assert parse(["--config", file, "--eval-every", "3"]) == TrainConfig(
        config=Path(file), out=tmp_path / "run", resume=True, steps=8, width=64, eval_every=3
    )
    with pytest.raises(UserError, match="started with --width 64, and --resume cannot go on with --width 32"):
        parse(["--config", toml(tmp_path, f'resume = true\nwidth = 32\nout = "{tmp_path}/run"')])


@pytest.mark.parametrize(
    "options", [dict(stages=4), dict(stages=2, virtual_stages=2), dict(stages=4, microbatches=1)]
)
def test_an_automatic_schedule_is_the_shortest_of_those_that_fit(options):
    config = TrainConfig(schedule="auto", **options)
    chosen = with_schedule(config)
    steps = {}
    for name in get_args(Schedule)[1:]:
        with contextlib.suppress(ValueError):
            found = by_name(name, config.stages, config.microbatches, config.virtual_stages, UNIT_COSTS)
            if found.stages_per_mesh == config.virtual_stages:
                steps[name] = found.timeline.makespan
    assert len(steps) > 2 and steps[chosen.schedule] == min(steps.values())
    assert chosen == dataclasses.replace(config, schedule=chosen.schedule) == with_schedule(chosen)
