"""A setting, or a sampling parameter, is one line: it shows wherever users meet it and, unless excluded, in the key."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from graphllm.cli.options import engine_options, sampling_options
from graphllm.config import Bucket, CompileConfig, ConfigError, EngineConfig, Target, args, definitions, setting
from graphllm.config.args import args_class
from graphllm.config.engine import SchedulerConfig
from graphllm.config.parameter import Column, columns, number, parameter
from graphllm.config.reference import reference
from graphllm.config.requests.sampling_params import SamplingParams, sampling_columns
from graphllm.config.setting import assemble
from graphllm.config.stub import stub
from graphllm.program import artifact
from graphllm.server.apis.openai.protocol import Body, with_parameters
from tests.waiting import PATIENCE


@dataclasses.dataclass(frozen=True)
class Compile(CompileConfig):
    fold_norms: bool = setting(False, help="Put norms into the weights behind them.")


@dataclasses.dataclass(frozen=True)
class Schedule(SchedulerConfig):
    max_waiting_seconds: float = setting(9.5, help="Refuse older requests.", key="read while an engine runs")


@dataclasses.dataclass(frozen=True)
class Config(EngineConfig):
    compilation: Compile
    scheduler: Schedule


@dataclasses.dataclass(frozen=True)
class Params(SamplingParams):
    wildness: float = parameter(0.5, number("give a number from 0", ge=0), column=("float32", 0.5), help="Of tokens.")


def _help(decorate: Any) -> str:
    """The help of a command with the options of a decorator."""
    app = typer.Typer()

    @app.command()
    @decorate
    def command(given: Any) -> None:
        """Do it."""
        print(given)

    return CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output


def test_a_setting_is_one_line() -> None:
    args = args_class(Config)
    assert args().fold_norms is False
    assert args(fold_norms=True, max_waiting_seconds=3).max_waiting_seconds == 3
    assert "fold_norms: Put norms into the weights behind them." in str(args.__doc__)
    shown = _help(engine_options(config=Config))
    for text in ("--fold-norms", "Put norms into the weights", "--max-waiting-seconds", "9.5", "--max-num-seqs"):
        assert text in shown
    page = reference(Config)
    assert "| `fold_norms` | bool | `False` | Put norms into the weights behind them. | `--fold-norms`" in page
    assert "| no: read while an engine runs |" in page


def test_a_setting_is_in_the_key_unless_it_says_why_not() -> None:
    plain = Compile(Target("cpu", ("avx2",)), buckets=(Bucket("mixed", 2, 8),))
    keys = {
        artifact.key_of(artifact.key_factors({}, "t", config))
        for config in (plain, dataclasses.replace(plain, fold_norms=True), dataclasses.replace(plain, jobs=3))
    }
    assert len(keys) == 2
    for name, d in definitions(EngineConfig).items():
        outside = d.path[0] != "compilation"
        assert d.not_key is None or len(d.not_key) > 10, name
        assert not outside or d.not_key, f"{name}: what compiled programs depend on stands in CompileConfig"


def test_settings_reach_their_groups() -> None:
    found = assemble(Config, {"model": "m", "target": Target("cpu", ()), "fold_norms": True, "max_num_queued_reqs": 4})
    assert (found.model.model, found.compilation.fold_norms, found.scheduler.max_num_queued_reqs) == ("m", True, 4)
    assert found.load.artifact == "build"


def test_groups_within_groups() -> None:
    @dataclasses.dataclass(frozen=True)
    class Spread:
        rank_count: int = setting(1, help="Processes that share the work.")

    @dataclasses.dataclass(frozen=True)
    class Nested(SchedulerConfig):
        spread: Spread = Spread()

    Nested.__annotations__["spread"] = Spread
    assert definitions(Nested)["rank_count"].path == ("spread",)
    assert assemble(Nested, {"rank_count": 3, "scheduling_policy": "priority"}) == Nested(
        scheduling_policy="priority", spread=Spread(3)
    )


def test_a_field_is_a_setting() -> None:
    @dataclasses.dataclass(frozen=True)
    class Forgotten(SchedulerConfig):
        plain: int = 1

    with pytest.raises(TypeError, match=r"Forgotten\.plain is no setting: define it by graphllm\.config\.setting"):
        definitions(Forgotten)


def test_a_name_has_one_definition() -> None:
    @dataclasses.dataclass(frozen=True)
    class Second(SchedulerConfig):
        block_size: int = setting(1, help="Another one.")

    @dataclasses.dataclass(frozen=True)
    class Twice:
        compilation: CompileConfig
        scheduler: Second

    Twice.__annotations__ |= {"compilation": CompileConfig, "scheduler": Second}
    with pytest.raises(TypeError, match="block_size is defined twice"):
        definitions(Twice)


def test_values_a_setting_cannot_have() -> None:
    args = args_class(EngineConfig)
    for name, value in (("scheduling_policy", "random"), ("load_format", "dumy"), ("backend", "x"), ("target", "tpu")):
        with pytest.raises(ConfigError, match=rf"^{name} is '{value}': use "):
            args(**{name: value})
    with pytest.raises(ConfigError, match=r"^max_num_seq is 3: not supported; .* did you mean max_num_seqs\?$"):
        args(max_num_seq=3)


def test_a_sampling_parameter_is_one_line() -> None:
    assert Params().wildness == 0.5
    with pytest.raises(ConfigError, match=r"^temperature is -1: .*; wildness is -2: give a number from 0$"):
        Params(temperature=-1, wildness=-2)
    assert columns(Params) == (*sampling_columns(), Column("wildness", "float32", 0.5))
    assert "--wildness" in _help(sampling_options(params=Params))
    assert "| `wildness` | float | `0.5` | Of tokens. |" in reference(params=Params)
    body = with_parameters(Body, Params)
    assert body(wildness=2.0).wildness == 2.0
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        body(wildness=-1.0)


def test_columns_on_the_device() -> None:
    found = {c.name: (c.dtype, c.neutral) for c in sampling_columns()}
    assert found == {
        "presence_penalty": ("float32", 0.0), "frequency_penalty": ("float32", 0.0),
        "repetition_penalty": ("float32", 1.0), "temperature": ("float32", 0.0), "top_p": ("float32", 1.0),
        "top_k": ("int32", 0), "min_p": ("float32", 0.0), "seed": ("int64", 0),
    }  # fmt: skip
    assert [c.name for c in sampling_columns() if c.source == "request"] == ["seed"]


def test_the_page_of_settings_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == reference(), "run: python -m graphllm.config.reference > docs/settings.md"


def test_the_type_checker_knows_the_settings() -> None:
    file = Path(args.__file__).with_suffix(".pyi")
    assert file.read_text() == stub(), "run: python -m graphllm.config.stub > graphllm/config/args.pyi"


def test_the_config_imports_nothing_heavy() -> None:
    script = (
        "import sys, graphllm.config\nprint([m for m in ('torch', 'numpy', 'msgspec', 'typer') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE).stdout
        == "[]\n"
    )
