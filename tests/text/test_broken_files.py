"""Tokenizers of damaged files, and the other files beside them: read, or refused in one line that names the file."""

from __future__ import annotations

import copy
import json
import random
import shutil

import gguf
import pytest
from tiny import tiny_checkpoint

from prefold.checkpoint import GGUFFile, resolve
from prefold.errors import CheckpointError, PrefoldError
from prefold.tasks import embed_settings, end_ids, recommended_sampling
from prefold.text import load_tokenizer, tokenizer_or_none

ODD = [None, True, -1, 3, 2**70, 1.5, "", "x", "\ud800", [], [1], ["a"], [[]], {}, {"a": 1}, {"content": 5}, 1e308]
NAMES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
NAMES += ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory.mktemp("broken"), "qwen3", num_hidden_layers=1)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": place, "type": f"sentence_transformers.models.{kind}"} for place, kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "include_prompt": true}')
    text = {"message": {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}}
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9, "modality_config": text}))
    (path / "config_sentence_transformers.json").write_text('{"prompts": {"a": "b"}, "default_prompt_name": null}')
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (path / "generation_config.json").write_text('{"eos_token_id": [2], "do_sample": true, "top_k": 5}')
    return path


def places(value, path=()):
    """Where in a JSON value something stands."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def changed(value, rng):
    """The value with something else at one place, or without what stands there."""
    value = copy.deepcopy(value)
    path = rng.choice(list(places(value)))
    if not path:
        return rng.choice(ODD)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.2:
        del holder[path[-1]]
    else:
        holder[path[-1]] = rng.choice(ODD)
    return value


def read_all(path):
    """What is read of a checkpoint before its weights. True where nothing is refused."""
    try:
        checkpoint = resolve(str(path))
        tokenizer = tokenizer_or_none(checkpoint)
        embed_settings(checkpoint)
        end_ids(checkpoint, tokenizer)
        recommended_sampling(checkpoint)
        if tokenizer is not None:
            tokenizer.encode("the yes no <|im_end|>")
        return True
    except PrefoldError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return False


def fuzz_files(folder, tmp_path, seed, count):
    rng, read = random.Random(seed), 0
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    good = {name: (folder / name).read_bytes() for name in NAMES}
    for number in range(count):
        name = rng.choice(NAMES)
        # tokenizer.json is mostly its vocabulary, and the library that reads it is not ours to test.
        if name == "tokenizer.json" or number % 4 == 0:
            data = bytearray(good[name])
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            data = json.dumps(changed(json.loads(good[name]), rng)).encode()
        (copied / name).write_bytes(data)
        read += read_all(copied)
        (copied / name).write_bytes(good[name])
    assert 0 < read < count


def test_damaged_files_of_a_folder(folder, tmp_path):
    assert read_all(folder)
    fuzz_files(folder, tmp_path, 0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_damaged_files_of_a_folder(folder, tmp_path, seed):
    fuzz_files(folder, tmp_path, seed, 4000)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    """A file of one layer, with a tokenizer of either kind by turns."""
    import numpy as np

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {"block_count": 1, "context_length": 64, "embedding_length": 32}.items():
        writer.add_uint32(f"llama.{name}", value)
    for name, value in {"feed_forward_length": 32, "attention.head_count": 4}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<s>", "</s>"])
    writer.add_token_types([1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    for name, shape in {"token_embd.weight": (5, 32), "blk.0.attn_q.weight": (32, 32)}.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fuzz_gguf(gguf_path, tmp_path, seed, count):
    rng, read = random.Random(seed), 0
    good = gguf_path.read_bytes()
    header, bad = good.index(b"blk.0.attn_q.weight") + 80, tmp_path / "bad.gguf"
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(4, header)] = rng.choice([0, 1, 2, 8, 9, 127, 128, 255, rng.randrange(256)])
        bad.write_bytes(data[: rng.randrange(8, header)] if rng.random() < 0.1 else data)
        read += read_all(bad)
        try:
            for name in (file := GGUFFile(bad)).tensors:
                file.dequantize(name)
                file.type_name(name)
        except CheckpointError as error:
            assert "bad.gguf" in str(error) and "\n" not in str(error)
    assert 0 < read < count


def test_damaged_gguf_headers(gguf_path, tmp_path):
    assert read_all(gguf_path)
    fuzz_gguf(gguf_path, tmp_path, 0, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_damaged_gguf_headers(gguf_path, tmp_path, seed):
    fuzz_gguf(gguf_path, tmp_path, seed, 5000)


def test_a_folder_without_a_tokenizer_takes_token_ids(tmp_path):
    from prefold import LLM
    from prefold.errors import InputError

    path = tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    llm = LLM(str(path), dtype="float32")
    assert llm.tokenizer is None
    assert len(llm.embed([[5, 6], [7]])) == 2
    assert len(llm.generate([5, 6, 7], max_tokens=3).tokens) <= 3
    with pytest.raises(InputError, match=r"no tokenizer.*give token ids"):
        llm.embed("text")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(resolve(str(path)))
