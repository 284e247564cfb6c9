"""Tiles equal those of transformers' image processors, to the last bit: for any size, mode and settings."""

from __future__ import annotations

import itertools

import numpy as np
import PIL.Image
import pytest

from prefold.errors import CheckpointError, InputError, UnsupportedModelError
from prefold.features.images.config import TowerConfig
from prefold.features.images.decode import Image, image_of
from prefold.features.images.processor import Gemma3Processor, Gemma4Processor, Idefics3Processor

# What a prompt has around an image, for each of its rows, and before the tile of the whole.
PLACEHOLDERS = ("<fake_token_around_image>", "<image>", "<global-img>")
MODES = ("RGB", "RGB", "RGBA", "L", "LA", "P", "CMYK", "1", "YCbCr", "PA", "RGBX", "transparent")


def tower(kind: str = "gemma3", **sizes) -> TowerConfig:
    return TowerConfig(
        **{
            "kind": kind,
            "hidden": 8,
            "layers": 1,
            "heads": 2,
            "intermediate": 16,
            "image_size": 24,
            "patch_size": 4,
            "merge": 3,
            "output": 8,
        }
        | sizes
    )


def picture(rng: np.random.Generator, height: int, width: int, mode: str) -> PIL.Image.Image:
    """Smooth, so that resizing matters, with some noise."""
    down, across = np.mgrid[0:height, 0:width]
    waves = rng.uniform(0.01, 0.6, (4, 2))
    pixels = np.stack([np.sin(a * down + b * across) for a, b in waves], -1) * 120 + 128
    pixels = (pixels + rng.uniform(-8, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
    found = PIL.Image.fromarray(pixels, "RGBA")
    if mode == "transparent":
        found = found.convert("RGB").convert("P")
        found.info["transparency"] = 3
        return found
    if mode in ("RGBA", "LA", "PA"):
        return found if mode == "RGBA" else found.convert("LA").convert(mode)
    return found.convert("RGB").convert(mode)


def test_gemma3_pixels():
    from transformers import Gemma3ImageProcessorPil

    rng, scanned, compared = np.random.default_rng(0), 0, 0
    for number in itertools.count():
        if compared == 250:
            break
        longest = 40 if number % 5 else 700
        height, width = (int(n) for n in rng.integers(1, longest, 2))
        settings = {
            "size": {"height": int(rng.integers(1, 50)), "width": int(rng.integers(1, 50))},
            "resample": int(rng.integers(0, 6)),
            "do_rescale": bool(rng.random() < 0.9),
            "do_normalize": bool(rng.random() < 0.9),
            "rescale_factor": float(rng.choice([1 / 255, 0.004])),
            "image_mean": rng.uniform(0, 1, 3).tolist(),
            "image_std": rng.uniform(0.1, 1, 3).tolist(),
            "do_pan_and_scan": bool(rng.random() < 0.7),
            "pan_and_scan_min_crop_size": int(rng.choice([3, 8, 256])),
            "pan_and_scan_max_num_crops": int(rng.integers(2, 6)),
            "pan_and_scan_min_ratio_to_activate": float(rng.uniform(1, 2)),
        }
        given = picture(rng, height, width, MODES[number % len(MODES)])
        ours = Gemma3Processor(tower(), settings)
        try:
            theirs = Gemma3ImageProcessorPil(**settings)(given, return_tensors="np")
        except ValueError:  # a crop of no pixels at all, out of settings that nobody has
            continue
        tiles = ours.tiles(image_of(given))
        scanned += len(tiles) > 1
        compared += 1
        np.testing.assert_array_equal(tiles, theirs["pixel_values"].astype(np.float32), strict=True)
        assert ours.layout(height, width).tiles == len(tiles) == 1 + theirs["num_crops"][0]
    assert scanned > 40


def test_gemma4_pixels():
    """transformers has the image as patches, each row by row and with its colours last, and these at the end of it."""
    from transformers import Gemma4ImageProcessorPil

    rng, narrow = np.random.default_rng(0), 0
    for number in range(150):
        longest = [60, 700, 30, 9000][number % 4]
        height, width = (int(n) for n in rng.integers(1, longest, 2))
        if number % 4 == 3:
            height, width = sorted((height, 1 + width % 20), reverse=bool(number % 8 == 3))
        patch, merge, most = int(rng.choice([2, 4])), int(rng.choice([2, 3])), int(rng.choice([70, 140]))
        settings = {
            "patch_size": patch,
            "pooling_kernel_size": merge,
            "max_soft_tokens": most,
            "resample": int(rng.integers(0, 6)),
            "do_rescale": bool(rng.random() < 0.9),
            "do_normalize": bool(rng.random() < 0.5),
            "image_mean": rng.uniform(0, 1, 3).tolist(),
            "image_std": rng.uniform(0.1, 1, 3).tolist(),
        }
        given = picture(rng, height, width, MODES[number % len(MODES)])
        own = tower("gemma4", image_size=0, patch_size=patch, merge=merge, most_rows=most)
        ours, theirs = Gemma4Processor(own, settings), Gemma4ImageProcessorPil(**settings)(given, return_tensors="np")
        ((tile,), layout) = ours.tiles(image_of(given)), ours.layout(*image_of(given).pixels.shape[:2])
        patches, places = theirs["pixel_values"][0], theirs["image_position_ids"][0]
        down, across = tile.shape[1] // patch, tile.shape[2] // patch
        narrow += min(down, across) == merge
        found = tile.reshape(3, down, patch, across, patch).transpose(1, 3, 2, 4, 0).reshape(down * across, -1)
        np.testing.assert_array_equal(found, patches[: len(found)].astype(np.float32), strict=True)
        assert places.tolist() == [[x, y] for y in range(down) for x in range(across)] + [[-1, -1]] * (
            len(places) - len(found)
        )
        assert layout.rows == theirs["num_soft_tokens_per_image"][0] <= most
        assert layout.text == f"<|image>{'<|image|>' * layout.rows}<image|>"
    assert narrow > 10


def test_settings_of_gemma_4_that_do_not_fit_the_tower():
    own = tower("gemma4", image_size=0, patch_size=4, merge=3, most_rows=9)
    fits = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 9}
    Gemma4Processor(own, fits).check("here")
    for key, value in (("patch_size", 16), ("pooling_kernel_size", 2), ("max_soft_tokens", 10)):
        with pytest.raises(CheckpointError, match=f"{key} is {value}"):
            Gemma4Processor(own, fits | {key: value}).check("here")
    with pytest.raises(UnsupportedModelError, match="do_resize"):
        Gemma4Processor(own, fits | {"do_resize": False})


@pytest.mark.parametrize("name", ["SmolVLM", "Idefics3"])
def test_idefics3_pixels(name):
    """Prompts have the text of a SmolVLMProcessor in place of an image. (As a whole it needs torchvision and num2words,
    for videos.)"""
    import transformers
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    rng, split = np.random.default_rng(1), 0
    for number in range(50):
        longest = 60 if number % 5 else 500
        height, width = (int(n) for n in rng.integers(1, longest, 2))
        size = {"longest_edge": int(rng.integers(1, 150))}
        if rng.random() < 0.2:
            size = {"height": int(rng.integers(1, 90)), "width": int(rng.integers(1, 90))}
        settings = {
            "do_resize": bool(rng.random() < 0.8),
            "size": size,
            "resample": int(rng.integers(0, 6)),
            "do_rescale": bool(rng.random() < 0.9),
            "do_normalize": bool(rng.random() < 0.9),
            "image_mean": rng.uniform(0, 1, 3).tolist(),
            "image_std": rng.uniform(0.1, 1, 3).tolist(),
            "do_image_splitting": bool(rng.random() < 0.8),
            "max_image_size": {"longest_edge": int(rng.integers(9, 40))},
        }
        given = picture(rng, height, width, MODES[number % len(MODES)])
        ours = Idefics3Processor(tower("idefics3"), settings)
        oracle = getattr(transformers, name + "ImageProcessorPil")(**settings)
        theirs = oracle([given], return_tensors="np", return_row_col_info=True)
        tiles = ours.tiles(image_of(given))
        split += len(tiles) > 1
        np.testing.assert_array_equal(tiles, theirs["pixel_values"][0].astype(np.float32), strict=True)
        assert (theirs["pixel_attention_mask"] == 1).all()  # no tile is smaller than the others
        layout = ours.layout(height, width)
        rows, cols = theirs["rows"][0][0], theirs["cols"][0][0]
        assert layout.tiles == len(tiles) == rows * cols + 1
        assert layout.text.count("<image>") == len(tiles) * ours.rows_per_tile
        assert layout.text == get_image_prompt_string(rows, cols, ours.rows_per_tile, *PLACEHOLDERS)
    assert split > 20


def test_very_long_images():
    import transformers

    given = picture(np.random.default_rng(2), 10, 20_000, "RGB")
    settings = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": True}
    theirs = transformers.SmolVLMImageProcessorPil(**settings)([given], return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(Idefics3Processor(tower("idefics3"), settings).tiles(image_of(given)), theirs)


def test_sides_of_more_than_4096_are_made_shorter():
    ours = Idefics3Processor(
        tower("idefics3"), {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 64}}
    )
    assert ours.layout(100, 200).sizes[0] == (2048, 4096)
    assert ours.layout(200, 100).sizes[0] == (4096, 2048)


def test_a_turned_picture_is_turned(tmp_path):
    given = picture(np.random.default_rng(3), 5, 9, "RGB")
    for orientation in range(1, 9):
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        given.save(tmp_path / "turned.png", exif=exif)
        read = image_of(PIL.Image.open(tmp_path / "turned.png"))
        assert (read.height, read.width) == ((9, 5) if orientation >= 5 else (5, 9))
        again = PIL.ImageOps.exif_transpose(PIL.Image.open(tmp_path / "turned.png"))
        np.testing.assert_array_equal(read.pixels, np.array(again))


def test_a_digest_is_of_the_pixels(tmp_path):
    given = picture(np.random.default_rng(4), 6, 8, "RGB")
    given.save(tmp_path / "a.png")
    given.save(tmp_path / "b.webp", lossless=True)
    a, b = (image_of(PIL.Image.open(tmp_path / name)) for name in ("a.png", "b.webp"))
    assert a == b and hash(a) == hash(b)
    other = a.pixels.copy()
    other[0, 0, 0] ^= 1
    assert a != Image(other)
    assert Image(np.zeros((2, 3, 3), np.uint8)) != Image(np.zeros((3, 2, 3), np.uint8))
    one, two = Gemma3Processor(tower(), {}), Gemma3Processor(tower(), {"do_pan_and_scan": True})
    assert one.key(a.digest) == one.key(b.digest) != two.key(a.digest)
    assert one.key(a.digest) != Gemma3Processor(tower(hidden=16), {}).key(a.digest)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(InputError, match="8 bits a channel"):
        image_of(PIL.Image.fromarray(np.zeros((2, 2), np.uint16)))
    with pytest.raises(ValueError, match="uint8"):
        Image(np.zeros((2, 2, 3), np.float32))
    for settings, what in (
        ({"do_centre_crop": True}, "do_centre_crop"),
        ({"do_center_crop": True, "crop_size": {"height": 2}}, "crop_size"),
        ({"do_resize": False}, "do_resize"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"image_mean": "x"}, "image_mean"),
        ({"resample": 9}, "resample"),
        ({"size": {"height": 4}}, "size.width"),
    ):
        with pytest.raises((CheckpointError, UnsupportedModelError), match=what):
            Gemma3Processor(tower(), settings).tiles(Image(np.zeros((2, 2, 3), np.uint8)))


def test_pixels_are_never_shown():
    assert repr(Image(np.zeros((2, 7, 3), np.uint8))) == "Image(7 x 2)"


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", "Idefics3", "SmolVLM"])
def test_settings_that_transformers_saves(tmp_path, name):
    """Every key of such a file is known."""
    import json

    import transformers

    kinds = {"Gemma3": Gemma3Processor, "Gemma4": Gemma4Processor}
    kind, sizes = kinds.get(name, Idefics3Processor), {"size": {"height": 24, "width": 24}}
    if name == "Gemma4":
        sizes = {}
    elif name != "Gemma3":
        sizes = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
    getattr(transformers, name + "ImageProcessorPil")(**sizes).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    made = kind(tower(name.lower() if name in kinds else "idefics3"), saved)
    assert made.tile_size == (None if name == "Gemma4" else (24, 24))
    older = {"do_convert_rgb": None, "do_pan_and_scan": None, "pan_and_scan_max_num_crops": None, "whatever": None}
    assert kind(made.tower, saved | older).identity == made.identity
