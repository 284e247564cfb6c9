"""Towers and projectors against transformers, and every way in which their tensors are stored."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf_gemma4 import write_gguf
from safetensors.torch import load_file, save_file
from tiny import DenseAttend
from tiny_vision import (
    FAMILIES,
    GEMMA4,
    drawing,
    patches_of,
    tile_attend,
    tiny_vision,
    vision_reference,
    write_gguf_gemma4_tower,
    write_gguf_tower,
)

from prefold import LLM, TextWithImages
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, InputError, UnsupportedModelError
from prefold.features.images import config as tower_config
from prefold.features.images import tower as tower_module
from prefold.features.images.decode import Image
from prefold.features.images.families import tower_model
from prefold.features.images.native import load_tower as load_natively
from prefold.features.images.processor import load_processor
from prefold.features.images.tensors import load_tower
from prefold.features.images.tower import TowerAttend
from prefold.kernels import MAX_HEAD_DIM
from prefold.model import MediaRows, config_from
from prefold.text import load_tokenizer
from prefold.worker.native.load import load_native, missing
from prefold.worker.torch.load import load_model
from prefold.worker.torch.worker import TorchWorker

FLOAT = {"dtype": torch.float32, "device": "cpu"}
# Who computes: PyTorch with its own products and with the kernels', and the native executor.
HOW = ("torch", "packed", "native")


def tower_at(checkpoint, config, how="torch", **options):
    if how == "native":
        return load_natively(checkpoint, load_native(checkpoint, config, dtype="float32"), **options)
    return load_tower(checkpoint, config, pack=how == "packed", **options, **FLOAT)


def loaded(folder, how="torch", **options):
    checkpoint = resolve(str(folder), **options)
    config = config_from(checkpoint.config)
    processor = load_processor(checkpoint, config.tower, None)
    return tower_at(checkpoint, config, how), processor


def book_attend(tower):
    """Attention by the book, over the arrays of a tower. An image of Gemma 4 is one tile."""
    attend = tile_attend(tower.config.patches, tower.executor.model.scale)
    if isinstance(tower.executor.table, torch.Tensor):
        return attend
    return lambda layer, q, k, v, start: attend(layer, *map(torch.from_numpy, (q, k, v)), start).numpy()


def rows_of(tower, processor, image):
    with torch.no_grad():
        rows = tower(tower.executor.arrays.send(processor.tiles(image)), book_attend(tower))
        return torch.as_tensor(rows)


def oracle_rows(folder, processor, image, attention="eager"):
    """What transformers puts in place of an image's tokens, [rows, hidden]."""
    tiles, tower = processor.tiles(image), processor.tower
    given = {"pixel_values": torch.from_numpy(tiles[None] if tower.kind == "idefics3" else tiles)}
    if tower.kind == "gemma4":
        given = patches_of([tiles], tower.patch_size, tower.patches)
    with torch.no_grad():
        found = vision_reference(folder, attention).model.get_image_features(**given).pooler_output
    return (torch.cat(list(found)) if isinstance(found, (list, tuple)) else found).flatten(0, -2)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", FAMILIES + GEMMA4)
def test_rows_equal_those_of_transformers(tmp_path, family, how):
    folder = tiny_vision(tmp_path, family, settings={"do_pan_and_scan": True} if family == "gemma3" else None)
    tower, processor = loaded(folder, how)
    for seed, (height, width) in enumerate([(26, 26), (5, 61), (90, 31)]):
        image = Image(drawing(seed, height, width))
        rows, expected = rows_of(tower, processor, image), oracle_rows(folder, processor, image)
        assert rows.shape == expected.shape
        layout = processor.layout(height, width)
        assert len(rows) == layout.tiles * (layout.rows or processor.rows_per_tile)
        difference = (rows - expected).abs().max()
        own = (oracle_rows(folder, processor, image, "sdpa") - expected).abs().max()
        assert difference <= max(1e-4, 3 * own), (difference, own)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
@pytest.mark.parametrize("size", [7, 13, 36, 50, 512])
@pytest.mark.parametrize("own", [False, True], ids=["by the book", "our attention"])
@pytest.mark.parametrize("how", ["torch", "native"])
def test_in_pieces(tmp_path, monkeypatch, size, own, how, family):
    """Tiles in pieces of some rows, one at a time and several: three tiles of 36 patches, or one of 32."""
    for module in (tower_module, tower_config):
        monkeypatch.setattr(module, "PIECE_ROWS", size)
    tower, _ = loaded(tiny_vision(tmp_path, family, vision={"num_hidden_layers": 3}), how)
    rng = np.random.default_rng(size)
    shape, rows, patches = ((3, 3, 26, 26), 27, 3 * 36) if family == "gemma3" else ((1, 3, 16, 32), 8, 32)
    tiles = tower.executor.arrays.send(rng.random(shape, np.float32))
    attend = TowerAttend(tower.executor) if own else book_attend(tower)
    pieces = 3 * len(tower.config.pieces(*tower.config.tiles_of(rows)))
    assert pieces == 3 * 2 * -(-patches // size)
    with torch.no_grad():
        whole = tower(tiles, attend)
        assert abs(whole - tower(tiles, book_attend(tower))).max() < 1e-5
        for steps in (np.ones(pieces, int), rng.integers(1, 5, pieces)):
            rows = tower.start(tiles, attend)
            for stop in steps.cumsum().tolist():
                assert rows.num_done < pieces
                if tower.go_on(rows, stop):
                    break
            assert rows.num_done == pieces
            assert abs(tower.finish(rows) - whole).max() < 1e-5


@pytest.mark.parametrize("how", ["torch", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_towers(tmp_path, family, how):
    vision = {"hidden_size": 24, "num_attention_heads": 2, "image_size": 20, "patch_size": 5, "num_hidden_layers": 1}
    own = {"mm_tokens_per_image": 4} if family == "gemma3" else {"scale_factor": 4}
    folder = tiny_vision(tmp_path, family, vision=vision, **own)
    tower, processor = loaded(folder, how)
    assert tower.config.rows == (4 if family == "gemma3" else 1)
    image = Image(drawing(3, 20, 20))
    torch.testing.assert_close(
        rows_of(tower, processor, image), oracle_rows(folder, processor, image), rtol=0, atol=1e-4
    )


def test_tiles_of_wrong_sizes(tmp_path):
    """Of Gemma 4 they are whole squares, no more than there may be."""
    attend = book_attend(tower := loaded(tiny_vision(tmp_path, "gemma4"))[0])
    for height, width in ((20, 16), (8, 12), (0, 8), (8, 80)):
        with pytest.raises(ValueError, match=f"a tile is {height} x {width} pixels; its sides must be multiples of 8 "):
            tower.start(torch.zeros(1, 3, height, width), attend)
    tower, _ = loaded(tiny_vision(tmp_path, "gemma3"))
    with pytest.raises(ValueError, match="tiles are 26 x 30 pixels; they must be 26 x 26"):
        tower.start(torch.zeros(1, 3, 26, 30), attend)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_with_rows_of_an_image(tmp_path, family):
    """Causal everywhere: spans are the schedulers' and attention's."""
    folder = tiny_vision(tmp_path, family)
    checkpoint = resolve(str(folder))
    config = config_from(checkpoint.config)
    model = load_model(checkpoint, pack=False, **FLOAT)
    tower, processor = loaded(folder)
    image = Image(drawing(5, 26, 26))
    rows = rows_of(tower, processor, image)
    tokens = torch.randint(3, 260, (len(rows) + 9,))
    at = torch.arange(4, 4 + len(rows))
    with torch.no_grad():
        hidden = model(tokens, torch.arange(len(tokens)), DenseAttend(config), media=MediaRows(at, rows))
        logits = model.logits(hidden)
        oracle = vision_reference(folder)
        embeddings = oracle.get_input_embeddings()(tokens)
        embeddings[at] = oracle_rows(folder, processor, image)
        language = oracle.model.language_model if family == "gemma3" else oracle.model.text_model
        expected = oracle.lm_head(language(inputs_embeds=embeddings[None]).last_hidden_state)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


RENAMED = {
    "gemma3": [
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "smolvlm": [("model.text_model.", "text_model."), ("model.vision_model.", "vision_model.")],
}


@pytest.mark.parametrize("family", sorted(RENAMED))
def test_names_before_and_since_transformers_5(tmp_path, family):
    folder = tiny_vision(tmp_path, family)
    image = Image(drawing(1, 26, 26))
    before = rows_of(*loaded(folder), image)
    logits = text_logits(folder)
    tensors = load_file(folder / "model.safetensors")
    for old, new in RENAMED[family]:
        tensors = {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()}
    if family == "gemma3":  # between the two there was a third
        tensors = {k.replace("vision_tower.vision_model.", "vision_tower."): v for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(rows_of(*loaded(folder), image), before)
    assert torch.equal(text_logits(folder), logits)


def text_logits(folder, **options):
    checkpoint = resolve(str(folder), **options)
    model = load_model(checkpoint, pack=False, **FLOAT)
    tokens = torch.arange(3, 30)
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(len(tokens)), DenseAttend(model.config)))


def test_tensors_that_do_not_belong(tmp_path):
    folder = tiny_vision(tmp_path, "gemma3")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for change, what in (
        ({"vision_tower.encoder.layers.0.extra.weight": torch.zeros(2)}, "unexpected: layers.0.extra.weight"),
        ({"vision_tower.post_layernorm.bias": torch.zeros(2)}, r"misshapen: post_layernorm.bias is \[2\], not \[30\]"),
        ({"vision_tower.post_layernorm.bias": None}, "missing: post_layernorm.bias"),
    ):
        save_file({k: v for k, v in (tensors | change).items() if v is not None}, path)
        with pytest.raises(CheckpointError, match=what):
            loaded(folder)
    save_file(tensors | {"strange.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected: strange\.weight"):
        load_model(resolve(str(folder)), **FLOAT)


def test_configs_that_are_refused(tmp_path):
    folder = tiny_vision(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    for change, what in (
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "three positions"),
        ({"architectures": None, "model_type": "qwen2_vl"}, "three positions"),
        ({"mm_tokens_per_image": 8}, "mm_tokens_per_image is 8"),
        ({"mm_tokens_per_image": 25}, "cannot be averaged"),
        ({"vision_config": config["vision_config"] | {"hidden_act": "gelu"}}, r"vision_config\.hidden_act"),
        ({"vision_config": config["vision_config"] | {"num_channels": 1}}, r"vision_config\.num_channels"),
        ({"vision_config": config["vision_config"] | {"patch_size": 0}}, r"vision_config\.patch_size"),
        ({"vision_config": config["vision_config"] | {"num_attention_heads": 7}}, "7 heads"),
    ):
        with pytest.raises(CheckpointError, match=what):
            config_from(config | change)
    gemma = json.loads((tiny_vision(tmp_path, "gemma4 both ways") / "config.json").read_text())
    vision = gemma["vision_config"]
    for change, what in (
        ({"vision_soft_tokens_per_image": 10}, "10 rows .*sliding_window of 9"),
        ({"vision_config": vision | {"hidden_activation": "gelu"}}, r"vision_config\.hidden_activation"),
        ({"vision_config": vision | {"num_key_value_heads": 1}}, r"vision_config\.num_key_value_heads"),
        ({"vision_config": vision | {"head_dim": 10}}, r"vision_config\.head_dim is 10; it must be a multiple of 4"),
        ({"vision_config": vision | {"position_embedding_size": 17}}, "position_embedding_size is 17; .* at least 18"),
        ({"vision_config": vision | {"rope_parameters": {"rope_type": "default"}}}, "rope_type is 'default'"),
    ):
        with pytest.raises(CheckpointError, match=what):
            config_from(gemma | change)
    small = json.loads((tiny_vision(tmp_path, "gemma4") / "config.json").read_text())
    with pytest.raises(CheckpointError, match="pad_token_id is 400, which is not a token"):
        config_from(small | {"text_config": small["text_config"] | {"pad_token_id": 400}})
    smol = json.loads((tiny_vision(tmp_path, "smolvlm") / "config.json").read_text())
    for change, what in (
        ({"scale_factor": 4}, "scale_factor is 4"),
        ({"text_config": smol["text_config"] | {"model_type": "mistral"}}, "mistral"),
        ({"text_config": smol["text_config"] | {"use_resampler": True}}, "use_resampler"),
    ):
        with pytest.raises(CheckpointError, match=what):
            config_from(smol | change)


def test_settings_that_do_not_fit_the_tower(tmp_path):
    folder = tiny_vision(tmp_path, "gemma3", settings={"size": {"height": 30, "width": 30}})
    with pytest.raises(CheckpointError, match=r"tiles of 30 x 30 pixels; the tower of .* takes 26 x 26"):
        loaded(folder)
    folder = tiny_vision(tmp_path, "gemma3")
    nested = {"image_processor": json.loads((folder / "preprocessor_config.json").read_text()) | {"resample": 3}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert loaded(folder)[1].resample == 3  # where transformers 5 keeps them
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<image_soft_token>", "<other>"))
    checkpoint = resolve(str(folder))
    with pytest.raises(CheckpointError, match="no token '<image_soft_token>'"):
        load_processor(checkpoint, config_from(checkpoint.config).tower, load_tokenizer(checkpoint))


def test_a_model_without_a_tower(tmp_path):
    from tiny import tiny_checkpoint

    checkpoint = resolve(str(tiny_checkpoint(tmp_path)))
    with pytest.raises(UnsupportedModelError, match="takes text alone"):
        tower_at(checkpoint, config_from(checkpoint.config))


def write_text_gguf(folder, path):
    """The text model of a folder as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    text, gemma = config["text_config"], config["model_type"] == "gemma3"
    arch = "gemma3" if gemma else "llama"
    writer = gguf.GGUFWriter(path, arch)
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(1e6 if gemma else 10000.0)
    if gemma:
        writer.add_sliding_window(text["sliding_window"])
    else:
        writer.add_rope_dimension_count(text["head_dim"])
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    roles = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for stored, tensor in load_file(folder / "model.safetensors").items():
        if "vision" in stored or "connector" in stored or "projector" in stored:
            continue
        name = stored.removeprefix("language_model.").removeprefix("model.").removeprefix("text_model.")
        module, _, kind = name.rpartition(".")
        values = tensor.numpy()
        if gemma and module.endswith("norm"):
            values = values + np.float32(1)
        if module in names:
            writer.add_tensor(f"{names[module]}.{kind}", values)
            continue
        _, number, role = module.split(".", 2)
        if not gemma and role in ("self_attn.q_proj", "self_attn.k_proj"):
            count = heads if "q_proj" in role else kv
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{number}.{roles[role]}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_of_gguf_files_gives_the_rows_of_the_folder(tmp_path, family, swapped):
    types = ["sliding_attention"] * 5 + ["full_attention"]
    text = {"num_hidden_layers": 6, "layer_types": types, "query_pre_attn_scalar": 10} if family == "gemma3" else {}
    folder = tiny_vision(tmp_path, family, text={"head_dim": 10} | text)
    files = tmp_path / "files"
    files.mkdir()
    write_text_gguf(folder, files / "model.gguf")
    write_gguf_tower(folder, files / "mmproj.gguf", swapped=swapped)
    image = Image(drawing(2, 40, 70))
    tower, processor = loaded(folder)
    mmproj = {"mmproj": str(files / "mmproj.gguf")}
    again, of_gguf = loaded(files / "model.gguf", **mmproj)
    assert replace(again.config, norm_eps=1e-6, projector_eps=1e-6) == tower.config  # GGUF has float32
    if family == "gemma3":  # pixels of Idefics3 may differ: a GGUF file does not say how its images are resized
        assert torch.equal(torch.from_numpy(processor.tiles(image)), torch.from_numpy(of_gguf.tiles(image)))
    expected = rows_of(tower, processor, image)
    torch.testing.assert_close(rows_of(again, processor, image), expected, rtol=0, atol=1e-5)
    natively, _ = loaded(files / "model.gguf", "native", **mmproj)
    torch.testing.assert_close(rows_of(natively, processor, image), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(text_logits(files / "model.gguf", **mmproj), text_logits(folder), rtol=0, atol=1e-5)
    # The folder of both is enough.
    torch.testing.assert_close(rows_of(loaded(files)[0], processor, image), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", GEMMA4)
def test_a_pair_of_gguf_files_of_gemma_4(tmp_path, family):
    """Files do not say how many rows an image may have: 280. The tower for sound is left out."""
    vision = {"hidden_size": 36, "position_embedding_size": 560, "num_hidden_layers": 1}
    settings, text = {"max_soft_tokens": 280}, {"sliding_window": 300, "pad_token_id": 0}
    more = {"vision_soft_tokens_per_image": 280}
    folder = tiny_vision(tmp_path, family, vision=vision, text=text, settings=settings, **more)
    alone, files = tmp_path / "text", tmp_path / "files"
    alone.mkdir(), files.mkdir()
    tensors = load_file(folder / "model.safetensors")
    text = {k.replace("language_model.", ""): v for k, v in tensors.items() if "language_model" in k}
    save_file(text, alone / "model.safetensors")
    (alone / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())["text_config"]))
    write_gguf(alone, files / "model.gguf")
    write_gguf_gemma4_tower(folder, files / "mmproj.gguf")
    image = Image(drawing(2, 40, 70))
    tower, processor = loaded(folder)
    again, of_gguf = loaded(files)
    assert replace(again.config, norm_eps=1e-6, projector_eps=1e-6) == tower.config
    np.testing.assert_array_equal(of_gguf.tiles(image), processor.tiles(image), strict=True)
    expected = rows_of(tower, processor, image)
    assert len(expected) > 200
    torch.testing.assert_close(rows_of(again, processor, image), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rows_of(loaded(files, "native")[0], processor, image), expected, rtol=0, atol=1e-5)
    prompt, found = TextWithImages("see <|image|> now", [drawing(2, 40, 70)]), []
    for name in (folder, files):
        with LLM(str(name), dtype="float32", tokenizer=load_tokenizer(resolve(str(folder)))) as llm:
            found.append((llm.embed([prompt], pooling="last"), list(llm.generate(prompt, max_tokens=4).tokens)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0, atol=1e-5)
    assert found[1][1] == found[0][1]


def test_pairs_that_do_not_fit(tmp_path):
    folder = tiny_vision(tmp_path, "gemma3")
    smol = tiny_vision(tmp_path, "smolvlm")
    write_text_gguf(smol, tmp_path / "llama.gguf")
    write_gguf_tower(folder, tmp_path / "gemma.gguf")
    write_gguf_tower(smol, tmp_path / "smol.gguf")
    with pytest.raises(CheckpointError, match="is the tower of a gemma3 model"):
        resolve(str(tmp_path / "llama.gguf"), mmproj=str(tmp_path / "gemma.gguf"))
    with pytest.raises(CheckpointError, match="is not a tower: its architecture is 'llama'"):
        resolve(str(tmp_path / "llama.gguf"), mmproj=str(tmp_path / "llama.gguf"))
    with pytest.raises(CheckpointError, match="no such file"):
        resolve(str(tmp_path / "llama.gguf"), mmproj=str(tmp_path / "nothing.gguf"))
    with pytest.raises(CheckpointError, match="which contains its tower"):
        resolve(str(folder), mmproj=str(tmp_path / "gemma.gguf"))
    with pytest.raises(CheckpointError, match="contains 3"):
        resolve(str(tmp_path))


def test_random_weights():
    from prefold.checkpoint import Checkpoint

    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"hidden_size": 36, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 50},
        "vision_config": {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "image_size": 24,
                          "patch_size": 4, "intermediate_size": 40},
        "mm_tokens_per_image": 4,
    }  # fmt: skip
    checkpoint = Checkpoint.dummy(config)
    found = config_from(checkpoint.config)
    one, two, other = (tower_at(checkpoint, found, seed=seed) for seed in (0, 0, 1))
    processor = load_processor(checkpoint, found.tower, None)
    image = Image(drawing(1, 24, 24))
    rows = rows_of(one, processor, image)
    assert torch.equal(rows, rows_of(two, processor, image)) and not torch.equal(rows, rows_of(other, processor, image))
    assert rows.isfinite().all() and rows.std() > 0
    natively = rows_of(tower_at(checkpoint, found, "native"), processor, image)
    torch.testing.assert_close(natively, rows, rtol=0, atol=1e-5)
    parameters = sum(p.numel() for p in one.executor.weights.parameters())
    assert parameters == tower_model(found.tower).num_parameters


def test_random_weights_of_gemma_4(tmp_path):
    """Bounds and scales that change nothing."""
    from prefold.checkpoint import Checkpoint

    for family in GEMMA4:
        hf = json.loads((tiny_vision(tmp_path, family) / "config.json").read_text())
        checkpoint = Checkpoint.dummy(hf)
        found = config_from(checkpoint.config)
        tower, natively = (tower_at(checkpoint, found, how, seed=3) for how in ("torch", "native"))
        tile = np.random.default_rng(0).random((1, 3, 16, 24), np.float32)
        with torch.no_grad():
            rows = tower(torch.from_numpy(tile), book_attend(tower))
        assert rows.isfinite().all() and rows.std() > 0
        assert abs(natively(tile, book_attend(natively)) - rows.numpy()).max() < 1e-5
        parameters = sum(p.numel() for p in tower.executor.weights.parameters())
        assert parameters == tower_model(found.tower).num_parameters


def test_shapes_of_well_known_towers():
    from prefold.checkpoint import GEOMETRIES

    gemma = config_from(GEOMETRIES["gemma3-4b"])
    assert gemma.tower.rows == 256 and gemma.tower.span and gemma.hidden == 2560
    assert tower_model(gemma.tower).num_parameters == pytest.approx(420e6, rel=0.01)  # as the model's card says
    assert gemma.tower.layers * gemma.tower.pieces(1).sum() == pytest.approx(5.5e12, rel=0.02)
    smol = config_from(GEOMETRIES["smolvlm-256m"])
    assert smol.tower.rows == 64 and not smol.tower.span
    assert smol.num_parameters + tower_model(smol.tower).num_parameters == pytest.approx(256e6, rel=0.01)


def test_a_tower_that_the_native_executor_lacks(tmp_path):
    """Heads of its attention may be larger than those that the kernels take, and patches of an odd number of pixels
    have no whole words of two numbers."""
    wide = {"hidden_size": 2 * (MAX_HEAD_DIM + 2), "num_attention_heads": 2}
    for vision, dtype, what in (
        (wide, "float32", "heads of this size"),
        ({"patch_size": 5}, "bfloat16", "rows of whole words"),
        ({"patch_size": 5}, "float32", None),
    ):
        folder = tiny_vision(tmp_path, "smolvlm", vision={"image_size": 40, "num_hidden_layers": 1} | vision)
        config = config_from(resolve(str(folder)).config)
        assert missing(config, dtype) == what and missing(config.text, dtype) is None
    folder = tiny_vision(tmp_path, "smolvlm", vision=wide)
    assert isinstance(LLM(str(folder), dtype="float32").worker, TorchWorker)
    with pytest.raises(InputError, match="native executor lacks heads of this size"):
        LLM(str(folder), dtype="float32", executor="native")
