"""Families of one's own: the example of docs/families.md against transformers, and what is said of wrong functions."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from tiny import SIZES, DenseAttend, randomise, reference, write_tokenizer

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.cli import main
from prefold.errors import CheckpointError
from prefold.model import ModelConfig, builders, config_from, decoder, families, register_family
from prefold.model.config import head_order
from prefold.model.names import Names
from prefold.model.sources import as_stored
from prefold.spec import environment, plugins
from prefold.worker.torch.load import load_model
from prefold.worker.torch.tensors import array_of, tensor_of

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
EXAMPLES = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.S)
LLAMA = {k: v for k, v in SIZES.items() if not k.endswith("_token_id")} | {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture(autouse=True)
def registered_here(keep):
    """What a test registers is forgotten."""
    plugins.load_plugins()  # prefold's own features, for good
    keep(families.FAMILIES, families.REGISTERED)
    families.REGISTERED.clear()


def written(folder: Path, name: str, **more) -> Path:
    """A random checkpoint of transformers' class."""
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | more))
    randomise(model, seed=1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("BioGpt", {}),
        ("BioGpt", {"scale_embedding": False, "layer_norm_eps": 0.3}),
        ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
        ("FlexOlmo", {"norm_topk_prob": True}),
    ],
)
def test_the_example_of_the_page_gives_the_logits_of_transformers(tmp_path, name, more):
    folder = written(tmp_path / "model", name, **more)
    loading = config_from(resolve(str(folder)).config).loading
    assert loading or name == "FlexOlmo"  # by transformers' modules; FlexOlmo is a family of prefold's own, too
    example = next(example for example in EXAMPLES if f"{name}ForCausalLM" in example)
    assert len(example.splitlines()) < 60
    (tmp_path / "my_families.py").write_text(example, encoding="utf-8")
    runpy.run_path(str(tmp_path / "my_families.py"))
    assert f"{name}ForCausalLM" in families.REGISTERED
    assert not config_from(resolve(str(folder)).config).loading
    check_logits(folder)


def check_logits(folder: Path) -> None:
    """Compares a model's logits with those of transformers."""
    model = load_model(resolve(str(folder)), dtype=torch.float32, device="cpu")
    tokens = torch.randint(3, SIZES["vocab_size"], (45,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        theirs = reference(folder)(tokens[None]).logits[0]
        hidden = model(tokens, torch.arange(45), DenseAttend(model.config))
        assert (model.logits(hidden) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("named", "ranks"), [({"architectures": ["QuokkaForCausalLM"]}, 1), ({"model_type": "QuokkaForCausalLM"}, 2)]
)
def test_the_example_of_an_mlp_of_another_kind(tmp_path, monkeypatch, keep, named, ranks):
    """As a plugin, which other ranks import too, against transformers' Llama with that activation, and a bias on the
    attention's output."""
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, hidden_act="relu6"))
    for layer in theirs.model.layers:
        layer.self_attn.o_proj = torch.nn.Linear(36, 36)
    randomise(theirs, seed=1)
    theirs.eval().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    with pytest.raises(CheckpointError, match=r"'relu6' is not supported.*docs/families\.md"):
        config_from(settings)
    settings = {key: value for key, value in settings.items() if key not in ("architectures", "model_type")}
    path.write_text(json.dumps(settings | named), encoding="utf-8")
    example = next(example for example in EXAMPLES if "quokka" in example.lower())
    (tmp_path / "quokkas.py").write_text(example, encoding="utf-8")
    keep(builders.MLPS, plugins.loaded)
    monkeypatch.setenv(environment.PLUGINS, str(tmp_path / "quokkas.py"))
    write_tokenizer(tmp_path / "model")
    prompt, text = [5, 6, 7, 8], [9, 10, 11]
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([prompt + text])).logits[0].log_softmax(-1)
    expected = [float(logprobs[3 + i, token]) for i, token in enumerate(text)]
    with LLM(str(tmp_path / "model"), dtype="float32", tensor_parallel=ranks) as llm:
        assert llm.score(prompt, text).logprobs == pytest.approx(expected, abs=1e-4)
    assert llm.config.num_parameters == sum(p.numel() for p in theirs.parameters())


def test_a_key_that_a_model_calls_otherwise(tmp_path):
    """As the page has it: the key under its usual name, in front of the config."""
    folder = written(tmp_path / "model", "Starcoder2", norm_epsilon=0.3)
    names = Names(parts={"mlp.c_fc": ("mlp.up_proj",), "mlp.c_proj": ("mlp.down_proj",)})

    def starcoder2(config):
        biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), config.flag("use_bias"))
        config = {"rms_norm_eps": config.number("norm_epsilon")} | config
        return decoder(config, norm="layer", mlp="plain", names=names, **biases)

    register_family("Starcoder2ForCausalLM", starcoder2)
    check_logits(folder)


def test_heads_whose_halves_are_stored_in_turn(tmp_path):
    """Also where queries and keys are tensors of their own."""
    folder = written(tmp_path / "model", "Llama")
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(3, 40)
    with torch.inference_mode():
        theirs = stored(tokens[None]).logits[0]
        for layer in stored.model.layers:
            for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                linear.weight.copy_(tensor_of(as_stored(array_of(linear.weight), head_order(6, 6, True))))
    stored.save_pretrained(folder)
    register_family("LlamaForCausalLM", lambda config: decoder(config, names=Names(interleaved=True)))
    model = load_model(resolve(str(folder)), dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        hidden = model(tokens, torch.arange(37), DenseAttend(model.config))
        assert (model.logits(hidden) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            lambda config: {},
            "'MyForCausalLM' returned a dict, not a ModelConfig; ModelConfig has the fields vocab_size, hidden,",
        ),
        (lambda config: ModelConfig(hidden_size=64), "TypeError.*'hidden_size'; ModelConfig has the fields .*dtype"),
        (lambda config: config["layers"], "'MyForCausalLM' failed with KeyError: 'layers'"),
        (lambda config: ModelConfig(config.size("hiden")), r"config\.json has no hiden"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(family, message):
    register_family("MyForCausalLM", family)
    with pytest.raises(CheckpointError, match=message):
        config_from(LLAMA | {"architectures": ["MyForCausalLM"]})


def test_a_family_may_hand_its_config_to_another():
    """And that one is asked for what it has not read."""
    for own in (
        lambda config: config_from({**config, "architectures": ["LlamaForCausalLM"]}),
        lambda config: config_from(config | {"architectures": ["LlamaForCausalLM"]}),
    ):
        register_family("MyForCausalLM", own)
        config = LLAMA | {"architectures": ["MyForCausalLM"]}
        assert config_from(config).hidden == 36
        with pytest.raises(CheckpointError, match=r"no_rope_layers is .*LlamaForCausalLM does not read it"):
            config_from(config | {"no_rope_layers": [1, 0, 1]})


def test_a_registered_function_stands_in_place_of_the_checkpoints_code():
    register_family("MyForCausalLM", decoder)
    code = {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
    assert config_from(LLAMA | {"architectures": ["MyForCausalLM"], "auto_map": code}).layers == 3


@pytest.fixture
def plugin(tmp_path, monkeypatch, keep):
    """A .py file that registers a family, and no plugin of this process."""
    monkeypatch.setenv("PREFOLD_PLUGINS", "")
    keep(plugins.loaded)
    plugins.loaded.clear()
    path = tmp_path / "my_plugin.py"
    path.write_text(
        "from prefold.model import decoder, register_family\nregister_family('MyForCausalLM', decoder)\n",
        encoding="utf-8",
    )
    return path


def test_every_process_imports_the_plugins_of_the_command_line(plugin, tmp_path, monkeypatch):
    """A relative path is made absolute, and processes that are started have it in their environment."""
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(main, ["models", "--plugin", "my_plugin.py"])
    assert "MyForCausalLM" in listed.output, listed.output
    code = f"from prefold.model import config_from; print(config_from({LLAMA | {'architectures': ['MyForCausalLM']}}))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert child.stdout.startswith("ModelConfig(vocab_size=307")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_plugin", "no_such_plugin .--plugin or PREFOLD_PLUGINS. cannot be imported: ModuleNotFoundError"),
        ("no_such_plugin.py", r"there is no plugin .*/no_such_plugin\.py .*check the path"),
        ("wrong.py", r"/wrong\.py .*SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(plugin, tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("def", encoding="utf-8")
    done = CliRunner().invoke(main, ["embed", "a", "--plugin", name])
    assert done.exit_code == 1
    assert re.search(message, done.output), done.output
