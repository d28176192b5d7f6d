"""Settings from the command line's words and from mappings, and mistakes in them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import decodekit.conf
import hydra
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from decodekit.config import compose
from decodekit.config import hydra_session as schemas
from decodekit.config.compose import compose_config, compose_mapping, group_options, to_yaml
from decodekit.config.plugins import installed as plugins
from decodekit.config.plugins.registry import Registry
from decodekit.config.schema import BenchConfig, RunConfig
from decodekit.errors import ConfigError
from decodekit.interfaces.component import Component, ModelConfig
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.strategies.jacobi import JacobiConfig
from decodekit.strategies.lookahead.proposer import LookaheadConfig
from decodekit.strategies.prompt_lookup import PromptLookupConfig

CONF = Path(decodekit.conf.__file__).parent
KEYS = ", ".join(sorted(field.name for field in dataclasses.fields(RunConfig)))


@pytest.fixture(scope="module")
def default() -> RunConfig:
    return compose_config()


@pytest.fixture
def no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra is handed nothing, which also makes this quick."""
    composed = compose._compose([])

    def handed(overrides: Sequence[str]) -> Any:
        assert list(overrides) == []
        return copy.deepcopy(composed)

    monkeypatch.setattr(compose, "_compose", handed)


# --- what comes out ------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_dataclasses(default: RunConfig) -> None:
    assert dataclasses.asdict(default) == dataclasses.asdict(
        RunConfig(backend=default.backend, adapter=default.adapter, verifier=default.verifier)
    )
    names = (default.backend.name, default.adapter.name, default.verifier.name)
    assert names == ("auto", "auto", "exact_match")
    assert default.strategy == LookaheadConfig()
    assert default.sampling == SamplingParams()
    assert default.bench == BenchConfig()


def test_a_mapping_of_nothing_is_the_default(default: RunConfig) -> None:
    assert compose_mapping({}) == default


def test_overrides_of_every_kind(default: RunConfig) -> None:
    config = compose_config(
        [
            "strategy=prompt_lookup",
            "strategy.num_tokens=4",
            "model=llama2-7b",
            "model.revision=main",
            "backend=eager",
            "sampling=sample",
            "sampling.top_k=50",
            "seed=7",
            "dtype=bfloat16",
            "device=cuda:1",
            "max_new_tokens=0",
            "prefill_chunk=64",
            "chat=false",
            "job=bench",
            "bench.limit=2",
            "bench.strategies=[jacobi,{name:lookahead,window_size:3}]",
        ]
    )
    assert config == dataclasses.replace(
        default,
        strategy=PromptLookupConfig(num_tokens=4),
        model=ModelConfig(name="llama2-7b", repo="meta-llama/Llama-2-7b-chat-hf", revision="main"),
        backend=config.backend,
        sampling=SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7),
        seed=7,
        dtype="bfloat16",
        device="cuda:1",
        max_new_tokens=0,
        prefill_chunk=64,
        chat=False,
        job="bench",
        bench=BenchConfig(limit=2, strategies=["jacobi", {"name": "lookahead", "window_size": 3}]),
    )
    assert config.backend.name == "eager"


def test_overrides_may_come_in_any_order_and_the_last_one_counts() -> None:
    config = compose_config(
        ["strategy.window_size=2", "seed=1", "strategy=lookahead", "strategy=jacobi", "seed=2"]
    )
    assert config.strategy == JacobiConfig(window_size=2)
    assert config.seed == config.sampling.seed == 2


def test_the_last_model_counts(default: RunConfig) -> None:
    assert compose_config(["model=/a/b", "model=smollm2-135m"]).model == default.model
    assert compose_config(["model=smollm2-135m", "model=/a/b"]).model == ModelConfig(path="/a/b")
    assert compose_config(["model=/a/b", "model.path=/c"]).model == ModelConfig(path="/c")
    assert compose_config(["model=x.gguf"]).model == ModelConfig(path="x.gguf")
    trusted = ModelConfig(path="/a/b", revision="1e5", trust_remote_code=True)
    words = ["model=/a/b", "model.revision=1e5", "model.trust_remote_code=true"]
    assert compose_config(words).model == trusted


def test_a_path_is_text_however_it_is_given() -> None:
    path = "/a=b, c/${x}"
    assert compose_config(["model=local", f"model.path={path}"]).model.path == path
    assert compose_config([f"bench.prompts={path}"]).bench.prompts == path


def test_the_last_stop_counts() -> None:
    assert compose_config(["stop=x", "stop=[a,b]"]).stop == ["a", "b"]
    assert compose_config(["stop=[a,b]", "stop=x"]).stop == ["x"]


@pytest.mark.parametrize(
    "text",
    [
        "quotes ' \" and `",
        "commas, equals = and [brackets] {braces} (parentheses)",
        "${x} ${oc.env:HOME} $HOME",
        "${",
        "\\back\\slashes\\",
        "two\nlines\tand a tab",
        "true",
        "null",
        "12",
        "",
        " spaces ",
        "~+# 漢字 🎈",
        "-",
    ],
)
@pytest.mark.usefixtures("no_words")
def test_text_is_taken_as_it_is(text: str, default: RunConfig) -> None:
    overrides = [f"prompt={text}", f"prompt_file={text}", f"stop= {text}"]
    config = compose_config(overrides)
    expected = {"prompt": text, "prompt_file": text, "stop": [" " + text]}
    assert config == dataclasses.replace(default, **expected)
    assert compose_mapping(expected) == config
    # And it can be printed, whatever it is.
    assert {key: yaml.safe_load(to_yaml(config))[key] for key in expected} == expected


def test_several_stop_strings_are_a_list_in_hydras_grammar() -> None:
    assert compose_config(["stop=[a,'b, c']"]).stop == ["a", "b, c"]
    assert compose_config(["stop=[]"]).stop == []
    assert compose_config(["stop=[é,日, yes, 1.0]"]).stop == ["é", "日", "yes", "1.0"]
    assert compose_config(['stop=["a\\n","b"]']).stop == ["a\n", "b"]
    for override in ("stop=[a,[b]]", "stop=[a,{b: c}]", "stop=[a,'b]"):
        with pytest.raises(ConfigError, match="cannot read the list stop="):
            compose_config([override])


@pytest.mark.parametrize(
    "setting", ["stop_token_ids=5", "sampling.bad_words=x", "bench.strategies=x"]
)
def test_a_list_that_is_none_is_named_with_the_fix(setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        compose_config([setting])
    assert str(caught.value) == f"{key} must be a list: {key}=[...]"


def test_a_profile_looks_at_the_rest() -> None:
    config = compose_config(
        [
            "job=profile",
            "backend=eager",
            "adapter=hf",
            "dtype=bfloat16",
            "execution=eager",
            "prefill_chunk=8",
            "strategy=lookahead",
            "verifier=exact_match",
            "sampling=greedy",
            "profile.rows=[1,3]",
            "profile.contexts=[5]",
            "profile.output=a=b, [c].json",
            "profile.tree=chain",
        ]
    )
    assert (config.profile.rows, config.profile.contexts) == ([1, 3], [5])
    assert (config.profile.output, config.profile.tree) == ("a=b, [c].json", "chain")


def test_a_bias_by_token() -> None:
    config = compose_config(["sampling.logit_bias.5=100", "sampling.logit_bias.7=-2.5"])
    assert config.sampling.logit_bias == {5: 100.0, 7: -2.5}


def test_a_number_of_any_length_is_no_traceback() -> None:
    with pytest.raises(ConfigError, match="too large"):
        compose_config([f"sampling.temperature=1{'0' * 400}"])


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        ("verify", ["compare=true", "logprobs=2"]),
        ("bench", ["prompt=x", "prompt_file=x", "stop=x", "stop_token_ids=[3]", "compare=true"]),
        ("bench", ["constraint.regex=a", "format=json", "logprobs=1", "profile.repeats=3"]),
        ("generate", ["profile.repeats=3"]),
        ("verify", ["profile.output=x"]),
        ("profile", ["prompt=x", "stop=x", "stop_token_ids=[3]", "compare=true", "format=json"]),
        ("profile", ["strategy=jacobi", "strategy.window_size=4", "verifier=rejection"]),
        ("profile", ["sampling.top_k=3", "max_new_tokens=3", "chat=false"]),
        ("profile", ["bench.limit=3", "verify.limit=3"]),
    ],
)
def test_a_setting_that_its_job_does_not_look_at_is_refused(job: str, settings: list[str]) -> None:
    for setting in settings:
        key = setting.partition("=")[0].partition(".")[0]
        with pytest.raises(ConfigError) as caught:
            compose_config([f"job={job}", setting])
        assert str(caught.value) == f"{key} does nothing under job={job}; leave it out"


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy=lookahead", "strategy.window_size=2000"],
        ["strategy=lookahead", "strategy.max_candidates=2000"],
        ["strategy=jacobi", "strategy.window_size=5000"],
        ["strategy=prompt_lookup", "strategy.num_tokens=5000"],
        ["strategy=draft_model", "strategy.model=x", "strategy.num_tokens=5000"],
    ],
)
def test_a_tree_too_large_for_any_pass_is_refused(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"nodes; at most 4096 are run in a pass") as caught:
        compose_config(settings)
    assert caught.value.key is not None
    assert caught.value.key.startswith("strategy.")
    assert compose_config(["stop=a,b"]).stop == ["a,b"]


def test_one_stop_string_of_a_mapping_is_a_list_of_one() -> None:
    assert compose_mapping({"stop": "END"}).stop == ["END"]


@pytest.mark.parametrize(
    "path",
    [
        "/some/dir",
        "./dir",
        "../a dir/with spaces",
        "owner/name",
        '/it\'s/a "path", [really]',
        "/dollar/${x}",
        "/equals=/and,commas",
        "C:\\models/llama",
        "/ends/with\\",
        "/both\\'kinds",
    ],
)
def test_a_model_with_a_slash_is_a_path_or_a_hub_name(path: str) -> None:
    expected = ModelConfig(name="local", path=path)
    assert compose_config([f"model={path}"]).model == expected
    assert compose_mapping({"model": path}).model == expected


def test_a_model_of_a_mapping_may_have_any_name_if_it_says_where_it_is() -> None:
    assert compose_mapping({"model": {"name": "mine", "path": "/x"}}).model == ModelConfig(
        name="mine", path="/x"
    )
    assert compose_mapping({"model": {"repo": "a/b"}}).model == ModelConfig(
        name="local", repo="a/b"
    )


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({"strategy": "jacobi"}, ["strategy=jacobi"]),
        (
            {"strategy": {"name": "jacobi", "window_size": 3}},
            ["strategy=jacobi", "strategy.window_size=3"],
        ),
        ({"strategy": {"window_size": 3}}, ["strategy.window_size=3"]),
        ({"model": "llama2-7b"}, ["model=llama2-7b"]),
        (
            {"model": {"name": "llama2-7b", "revision": "v1"}},
            ["model=llama2-7b", "model.revision=v1"],
        ),
        ({"seed": 4, "sampling": "sample"}, ["seed=4", "sampling=sample"]),
        (
            {"sampling": {"temperature": 0.5, "seed": 3}},
            ["sampling.temperature=0.5", "sampling.seed=3"],
        ),
        ({"backend": {"name": "eager"}, "chat": True}, ["backend=eager", "chat=true"]),
        ({"bench": {"limit": 3, "baselines": []}}, ["bench.limit=3", "bench.baselines=[]"]),
    ],
)
def test_a_mapping_says_what_overrides_say(settings: dict[str, Any], overrides: list[str]) -> None:
    kept = OmegaConf.to_container(OmegaConf.create(settings))
    expected = compose_config(overrides)
    assert compose_mapping(settings) == expected
    assert settings == kept  # the caller's mapping is left alone
    assert compose_mapping(OmegaConf.create(settings)) == expected


def test_what_is_printed_can_be_read_again() -> None:
    config = compose_config(
        ["strategy=jacobi", "model=/a/b", "sampling=sample", "seed=3", "stop=[a]", "bench.limit=1"]
    )
    assert list(yaml.safe_load(to_yaml(config))) == list(dataclasses.asdict(config))
    assert compose_mapping(OmegaConf.create(to_yaml(config))) == config
    assert compose_mapping(yaml.safe_load(to_yaml(config))) == config


def test_interpolations_of_a_config_composed_elsewhere_are_resolved() -> None:
    app = OmegaConf.create(
        {"n": 3, "decoder": {"max_new_tokens": "${n}", "seed": "${.max_new_tokens}"}}
    )
    config = compose_mapping(app.decoder)
    assert (config.max_new_tokens, config.seed, config.sampling.seed) == (3, 3, 3)


# --- the files -----------------------------------------------------------------------------------


def names_in(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


CHOICES = {
    "strategy": ["autoregressive", "draft_model", "jacobi", "lookahead", "prompt_lookup"],
    "model": names_in("model"),
    "backend": ["auto", "eager", "flash", "flex", "invariant", "sdpa", "triton"],
    "adapter": ["auto", "hf", "llama"],
    "verifier": ["exact_match", "rejection"],
    "sampling": names_in("sampling"),
}


def test_components_and_files_are_the_options_of_their_groups() -> None:
    assert {group: group_options(group) for group in CHOICES} == CHOICES
    assert "smollm2-135m" in CHOICES["model"]


def test_only_groups_without_components_have_files() -> None:
    groups = {path.name for path in CONF.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert groups == {"model", "sampling"}


@pytest.mark.parametrize("turn", range(max(map(len, CHOICES.values()))))
def test_every_option_can_be_chosen(turn: int) -> None:
    """One option of every group at a time, until each has had its turn."""
    names = {group: options[turn % len(options)] for group, options in CHOICES.items()}
    config = compose_config([f"{group}={name}" for group, name in names.items()])
    assert (config.sampling.temperature > 0) is (names.pop("sampling") == "sample")
    assert {group: getattr(config, group).name for group in names} == names
    if names["model"] != "local":
        assert (config.model.repo is None) is (config.model.package is not None)


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message", "key"),
    [
        # names
        ("strategy=lookahed", "unknown strategy 'lookahed': did you mean 'lookahead'?", "strategy"),
        (
            "strategy=zzz",
            "unknown strategy 'zzz': choose one of: "
            "autoregressive, draft_model, jacobi, lookahead, prompt_lookup",
            "strategy",
        ),
        ("model=llama2-7", "unknown model 'llama2-7': did you mean 'llama2-7b'?", "model"),
        ("backend=flsh", "unknown backend 'flsh': did you mean 'flash'?", "backend"),
        ("sampling=sampl", "unknown sampling 'sampl': did you mean 'sample'?", "sampling"),
        ("verifier=exact", "unknown verifier 'exact': did you mean 'exact_match'?", "verifier"),
        # keys
        (
            "strategy.windw_size=3",
            "unknown key 'windw_size' in 'strategy': did you mean 'window_size'?",
            "strategy.windw_size",
        ),
        (
            "max_new_token=3",
            "unknown key 'max_new_token': did you mean 'max_new_tokens'?",
            "max_new_token",
        ),
        ("zzzzzz=3", f"unknown key 'zzzzzz': choose one of: {KEYS}", "zzzzzz"),
        (
            "seed.x=3",
            "'seed' has no settings inside it",
            "seed.x",
        ),
        ("+new=1", "keys cannot be added or removed: +new=1", "new"),
        ("++seed=1", "keys cannot be added or removed: ++seed=1", "seed"),
        ("~seed", "keys cannot be added or removed: ~seed", "seed"),
        # values
        (
            "seed=1,2",
            "seed has several values; a list is seed=[a,b], and a text that holds commas is "
            "quoted: 'seed=\"a,b\"'",
            "seed",
        ),
        (
            "max_new_tokens=many",
            "max_new_tokens: Value 'many' of type 'str' could not be converted to Integer",
            "max_new_tokens",
        ),
        (
            "strategy.window_size=2.5",
            "strategy.window_size: Value '2.5' of type 'float' could not be converted to Integer",
            "strategy.window_size",
        ),
        ("chat=maybe", "chat: Value 'maybe' is not a valid bool (type str)", "chat"),
        ("max_new_tokens=-1", "max_new_tokens must be 0 or more, not -1", "max_new_tokens"),
        (
            "strategy.window_size=0",
            "window_size must be 1 or more, not 0",
            "strategy.window_size",
        ),
        ("sampling.top_p=2", "top_p must be in (0, 1], not 2.0", "top_p"),
        ("bench.repeats=0", "repeats must be 1 or more, not 0", "bench.repeats"),
        ("job=train", "job must be generate, bench, profile or verify, not 'train'", "job"),
        ("device=${nope}", "device: Interpolation key 'nope' not found", "device"),
    ],
)
def test_a_mistake_is_one_line_with_the_fix(override: str, message: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert str(caught.value) == message
    assert caught.value.key == key


def test_another_strategy_is_not_chosen_by_its_name_alone() -> None:
    """The settings of the one that was chosen would be left behind."""
    with pytest.raises(ConfigError, match="strategy=jacobi"):
        compose_config(["strategy.name=jacobi"])


@pytest.mark.parametrize("override", ["+prompt", "seed = 5", "device=a=b"])
def test_what_is_no_override_is_said_to_be_none(override: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read the override: ") as caught:
        compose_config([override])
    assert "write key=value, and quote a value with special characters" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "lookahed"}, "unknown strategy 'lookahed': did you mean 'lookahead'?"),
        (
            {"strategy": {"name": "lookahed"}},
            "unknown strategy 'lookahed': did you mean 'lookahead'?",
        ),
        (
            {"strategy": {"name": "jacobi", "windw_size": 4}},
            "unknown key 'windw_size' in 'strategy': did you mean 'window_size'?",
        ),
        ({"max_new_token": 5}, "unknown key 'max_new_token': did you mean 'max_new_tokens'?"),
        ({"bench": {"limt": 5}}, "unknown key 'limt' in 'bench': did you mean 'limit'?"),
        (
            {"strategy": {"window_size": "wide"}},
            "strategy.window_size: Value 'wide' of type 'str' could not be converted to Integer",
        ),
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, not -1"),
        (
            {"max_new_tokens": None},
            "max_new_tokens: Incompatible value 'None' for field of type 'int'",
        ),
        ({"device": "${nope}"}, "device: Interpolation key 'nope' not found"),
        (
            OmegaConf.create({"device": "${nope}"}),
            "device: Interpolation key 'nope' not found",
        ),
        (
            {"strategy": None},
            "unknown strategy 'None': choose one of: "
            "autoregressive, draft_model, jacobi, lookahead, prompt_lookup",
        ),
    ],
    ids=str,
)
def test_a_mistake_in_a_mapping_is_one_line_too(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_mapping(settings)
    assert str(caught.value) == message


def test_no_target_is_ever_called() -> None:
    """Settings come from users: a ``_target_`` would be arbitrary code."""
    with pytest.raises(ConfigError):
        compose_mapping({"strategy": {"name": "jacobi", "_target_": "os.abort"}})
    with pytest.raises(ConfigError):
        compose_config(["strategy._target_=os.abort"])


# --- beside others -------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class EchoConfig:
    name: str = "echo"
    times: int = 2


@pytest.fixture
def with_echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry that holds a plugin's strategy as well."""
    found = Registry()
    for kind in ("strategy", "pool", "backend", "adapter", "verifier"):
        real = plugins.registry()
        for name in real.names(kind):  # type: ignore[arg-type]
            found.add(kind, [real.get(kind, name)], plugin="decodekit")  # type: ignore[arg-type]
    found.add("strategy", [Component("echo", EchoConfig, EchoConfig)], plugin="mine")
    for module in (compose, schemas):
        monkeypatch.setattr(module, "registry", lambda: found)
    before = dict(ConfigStore.instance().repo)
    yield
    ConfigStore.instance().repo = before


@pytest.mark.usefixtures("with_echo")
def test_a_plugins_strategy_is_chosen_like_any_other() -> None:
    config = compose_config(["strategy=echo", "strategy.times=3"])
    assert config.strategy == EchoConfig(times=3)
    assert compose_mapping({"strategy": {"name": "echo", "times": 3}}) == config
    with pytest.raises(ConfigError, match="unknown key 'time' in 'strategy': did you mean 'times'"):
        compose_config(["strategy=echo", "strategy.time=3"])
    assert "echo" in group_options("strategy")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[DictConfig]:
    """An application that has initialized Hydra for itself, with another version base."""
    (tmp_path / "app.yaml").write_text("lr: 0.1\ndecoder: {seed: 5, strategy: jacobi}\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        yield hydra.compose("app")
    GlobalHydra.instance().clear()


def test_composing_inside_an_application_of_hydra(app: DictConfig) -> None:
    config = compose_mapping(app.decoder)
    assert (config.seed, config.strategy) == (5, JacobiConfig())
    assert compose_config(["seed=5", "strategy=jacobi"]) == config
    assert "jacobi" in group_options("strategy")


def test_the_application_goes_on_as_before(app: DictConfig) -> None:
    compose_config()
    assert GlobalHydra.instance().is_initialized()
    assert hydra.compose("app") == app
    assert hydra.version.getbase() == hydra.version.Version("1.2")
    with pytest.raises(ConfigError):
        compose_config(["strategy=nope"])
    assert hydra.compose("app") == app


def test_the_applications_store_of_schemas_is_left_alone() -> None:
    """It holds on to the one store, and may call something ``schema/model`` itself."""
    store = ConfigStore.instance()
    before = dict(store.repo)
    try:
        store.store("model", {"mine": 1}, group="schema")
        compose_config()
        assert ConfigStore.instance() is store
        assert store.load("schema/model.yaml").node == {"mine": 1}
    finally:
        store.repo = before


def test_nothing_is_initialized_afterwards() -> None:
    GlobalHydra.instance().clear()
    compose_config()
    assert not GlobalHydra.instance().is_initialized()


def test_any_variable_of_a_chat_template_can_be_set() -> None:
    config = compose_config(
        ["chat_template_kwargs.enable_thinking=false", "chat_template_kwargs.style=plain"]
    )
    assert config.chat_template_kwargs == {"enable_thinking": False, "style": "plain"}
    given = {"enable_thinking": False, "documents": [{"title": "a"}], "deep": {"er": 1}}
    assert compose_mapping({"chat_template_kwargs": given}).chat_template_kwargs == given
    with pytest.raises(ConfigError, match="chat_template_kwargs does nothing under job=profile"):
        compose_config(["job=profile", "chat_template_kwargs.style=plain"])
