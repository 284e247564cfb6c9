"""Files of images: the pixels that transformers would see, or an error that says what is wrong."""

from __future__ import annotations

import io
import os
import signal
import threading

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from tiny_vision import drawing

from prefold.errors import InputError
from prefold.features.images.decode import DecodeBudget, Decoder, Limits, image_of

PICTURE = PIL.Image.fromarray(drawing(0, 23, 37))


@pytest.fixture(scope="module")
def decoder():
    with Decoder(Limits(seconds=20)) as decoder:
        yield decoder


def file_of(picture: PIL.Image.Image, kind: str, **options) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, kind, **options)
    return sink.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    """By the transformers rule for pictures: turned, and on white where they are transparent."""
    import torch  # noqa: F401 (transformers has convert_to_rgb only with it)
    from transformers.image_transforms import convert_to_rgb

    return convert_to_rgb(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))), return_numpy=True)


def transparent(mode: str) -> PIL.Image.Image:
    alpha = PIL.Image.fromarray(drawing(1, 23, 37)[:, :, 0], "L")
    found = PICTURE.copy()
    found.putalpha(alpha)
    return found.convert(mode) if mode != "P" else found.quantize(16)


FILES = {
    "jpeg": (PICTURE, "JPEG", {}),
    "progressive": (PICTURE, "JPEG", {"progressive": True}),
    "grey jpeg": (PICTURE.convert("L"), "JPEG", {}),
    "cmyk jpeg": (PICTURE.convert("CMYK"), "JPEG", {}),
    "png": (PICTURE, "PNG", {}),
    "one bit": (PICTURE.convert("1"), "PNG", {}),
    "palette": (PICTURE.quantize(7), "PNG", {}),
    "palette with alpha": (transparent("P"), "PNG", {}),
    "alpha": (transparent("RGBA"), "PNG", {}),
    "grey with alpha": (transparent("LA"), "PNG", {}),
    "colour key": (PICTURE, "PNG", {"transparency": (1, 2, 3)}),
    "webp": (PICTURE, "WEBP", {}),
    "webp with alpha": (transparent("RGBA"), "WEBP", {"lossless": True}),
    "gif": (PICTURE.quantize(9), "GIF", {}),
    "one pixel": (PICTURE.resize((1, 1)), "PNG", {}),
    "wide": (PICTURE.resize((20_000, 10)), "PNG", {}),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_of_files(decoder, name):
    picture, kind, options = FILES[name]
    data = file_of(picture, kind, **options)
    decoded = decoder.decode(data)
    np.testing.assert_array_equal(decoded.image.pixels, pixels_of(data), strict=True)
    assert not decoded.animated


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned(decoder, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP"):
        data = file_of(PICTURE, kind, exif=exif)
        image = decoder.decode(data).image
        np.testing.assert_array_equal(image.pixels, pixels_of(data))
        assert (image.height, image.width) == ((37, 23) if orientation >= 5 else (23, 37))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame(decoder, kind):
    frames = [PIL.Image.fromarray(drawing(seed, 20, 30)) for seed in (3, 4, 5)]
    data = file_of(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    decoded = decoder.decode(data)
    assert decoded.animated
    np.testing.assert_array_equal(decoded.image.pixels, pixels_of(data))
    if kind != "GIF":
        np.testing.assert_array_equal(decoded.image.pixels, drawing(3, 20, 30))


def test_a_mislabelled_file_is_what_it_holds(decoder):
    """Names and media types are not asked: a PNG called a.jpg is a PNG."""
    data = file_of(PICTURE, "PNG")
    np.testing.assert_array_equal(decoder.decode(data).image.pixels, np.array(PICTURE))


SIXTEEN = PIL.Image.fromarray((np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8))
BAD = {
    "empty": (b"", "is empty", "image_format"),
    "text": (b"hello", "is not an image", "image_format"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "an SVG", "image_format"),
    "svg with a head": (b'<?xml version="1.0"?>\n<svg></svg>', "an SVG", "image_format"),
    "html": (b"<html></html>", "is HTML", "image_format"),
    "bmp": (file_of(PICTURE, "BMP"), "a BMP", "image_format"),
    "tiff": (file_of(PICTURE, "TIFF"), "a TIFF", "image_format"),
    "pdf": (b"%PDF-1.4", "a PDF", "image_format"),
    "heic": (b"\x00\x00\x00\x18ftypheic" + bytes(20), "AVIF, HEIC", "image_format"),
    "cut jpeg": (file_of(PICTURE, "JPEG")[:-200], "damaged JPEG.*truncated", "image_damaged"),
    "cut png": (file_of(PICTURE, "PNG")[:-100], "damaged PNG", "image_damaged"),
    "cut webp": (file_of(PICTURE, "WEBP")[:-100], "image", "image_"),
    "cut gif": (file_of(PICTURE.quantize(9), "GIF")[:-100], "damaged GIF", "image_damaged"),
    "16 bits": (file_of(SIXTEEN, "PNG"), "more than 8 bits a channel", "image_depth"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_refused(decoder, name):
    data, message, code = BAD[name]
    with pytest.raises(InputError, match=message) as error:
        decoder.decode(data, "images[2]")
    assert error.value.field == "images[2]" and "images[2]" in str(error.value)
    assert error.value.code.startswith(code) and error.value.remedy


def test_sixteen_bits_of_colour_keep_the_upper_eight(decoder):
    """Pillow reads such files with 8 bits."""
    import struct
    import zlib

    values = (np.arange(4 * 4 * 3, dtype=np.uint16) * 1300).reshape(4, 12)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    np.testing.assert_array_equal(decoder.decode(data).image.pixels, (values >> 8).astype(np.uint8).reshape(4, 4, 3))


def test_limits():
    data = file_of(PICTURE, "PNG")
    with (
        Decoder(Limits(pixels=23 * 37 - 1)) as decoder,
        pytest.raises(InputError, match="37 x 23 pixels, more than 850"),
    ):
        decoder.decode(data)
    with Decoder(Limits(file_bytes=len(data) - 1)) as decoder, pytest.raises(InputError, match="bytes, more than"):
        decoder.decode(data)
    # A file of a few kilobytes that says it has 81 million pixels, in a process that has no memory for them.
    bomb = file_of(PIL.Image.new("1", (9000, 9000)), "PNG")
    assert len(bomb) < 40_000
    with Decoder(Limits(pixels=10**9, memory=400 << 20, seconds=30)) as decoder:
        with pytest.raises(InputError, match="MiB to decode") as error:
            decoder.decode(bomb)
        assert error.value.code == "image_too_large"
        np.testing.assert_array_equal(decoder.decode(data).image.pixels, np.array(PICTURE))
    # Far more than the usual limit, said in the header alone.
    with Decoder() as decoder, pytest.raises(InputError, match="more than 64,000,000"):
        decoder.decode(bomb)


def test_a_process_that_hangs_or_dies_is_replaced():
    data = file_of(PICTURE, "PNG")
    with Decoder() as decoder:
        decoder.decode(data)
        stopped, limits = decoder.helper.process.pid, decoder.limits
        os.kill(stopped, signal.SIGSTOP)
        decoder.limits = Limits(seconds=0.3)
        with pytest.raises(InputError, match=r"could not be decoded in 0\.3 s"):
            decoder.decode(data)
        decoder.limits = limits
        decoder.decode(data)
        assert decoder.helper.process.pid != stopped
        threading.Timer(0.2, os.kill, (decoder.helper.process.pid, signal.SIGKILL)).start()
        decoder.helper.process.wait()
        np.testing.assert_array_equal(decoder.decode(data).image.pixels, np.array(PICTURE))
        process = decoder.helper.process
    assert process.poll() is not None  # nothing is left behind


@pytest.mark.parametrize("read", range(1, 8))
def test_an_interrupt_leaves_no_answer_for_the_next_file(monkeypatch, read):
    """Wherever it comes: while the process starts, or between the parts of an answer (three reads each)."""
    red, blue = (PIL.Image.new("RGB", (9, 8), colour) for colour in ("red", "blue"))
    with Decoder() as decoder:
        receive, reads = decoder.helper.receive, []

        def interrupted(*arguments):
            reads.append(1)
            if len(reads) == read:
                raise KeyboardInterrupt
            return receive(*arguments)

        monkeypatch.setattr(decoder.helper, "receive", interrupted)
        for picture in (red, blue, red, blue):
            try:
                found = decoder.decode(file_of(picture, "PNG")).image
            except KeyboardInterrupt:
                continue
            np.testing.assert_array_equal(found.pixels, np.array(picture))
        assert len(reads) > read


def test_files_of_an_item_have_an_allowance_together():
    data = file_of(PICTURE, "PNG")
    with Decoder() as decoder:
        allowance = DecodeBudget(20)
        decoder.decode(data, "a", allowance)
        assert 0 < allowance.seconds_left < 20
        allowance.seconds_left = 0.3  # as if the first had taken long
        os.kill(decoder.helper.process.pid, signal.SIGSTOP)
        with pytest.raises(InputError, match=r"'b' and the images before it could not be decoded in 20 s") as caught:
            decoder.decode(data, "b", allowance)
        assert caught.value.code == "image_too_large"
        with pytest.raises(InputError, match="'c' and the images before it"):
            decoder.decode(data, "c", allowance)
        decoder.decode(data, "another item's", DecodeBudget(20))
    with Decoder() as decoder:
        decoder.decode(data)
        os.kill(decoder.helper.process.pid, signal.SIGSTOP)
        decoder.limits = Limits(seconds=0.3)
        with pytest.raises(InputError, match=r"'a' could not be decoded in 0\.3 s"):
            decoder.decode(data, "a", DecodeBudget(0.3))


def test_nothing_is_decoded_where_nothing_is_left_of_the_allowance():
    """However quick the process is: it is not even started."""
    with Decoder() as decoder:
        with pytest.raises(InputError, match="'c' and the images before it"):
            decoder.decode(file_of(PICTURE, "PNG"), "c", DecodeBudget(0))
        assert decoder.helper.process is None


def test_nothing_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    for name in ("json", "struct", "PIL"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not what was meant')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as of `python -c`
    with Decoder() as decoder:
        np.testing.assert_array_equal(decoder.decode(file_of(PICTURE, "PNG")).image.pixels, np.array(PICTURE))


def test_threads_wait_for_each_other(decoder):
    pictures = [PIL.Image.fromarray(drawing(seed, 20 + seed, 30)) for seed in range(8)]
    found: dict[int, np.ndarray] = {}

    def decode(i: int) -> None:
        found[i] = decoder.decode(file_of(pictures[i], "PNG")).image.pixels

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, picture in enumerate(pictures):
        np.testing.assert_array_equal(found[i], np.array(picture))


@pytest.mark.slow
def test_ten_thousand_broken_files():
    """No crash, bounded memory and time: each file gives pixels or an error with a code."""
    import psutil

    rng = np.random.default_rng(0)
    files = [file_of(picture, kind, **options) for picture, kind, options in FILES.values() if picture.width < 100]
    frames = [PIL.Image.fromarray(drawing(seed, 20, 30)) for seed in (3, 4, 5)]
    files += [file_of(frames[0], kind, save_all=True, append_images=frames[1:]) for kind in ("GIF", "WEBP", "PNG")]
    codes: dict[str, int] = {}
    most = 0
    with Decoder() as decoder:
        pids = set()
        for number in range(10_000):
            data = bytearray(files[rng.integers(len(files))])
            what = rng.integers(5)
            if what == 0:
                del data[int(rng.integers(len(data))) :]
            elif what == 1:
                at = int(rng.integers(len(data)))
                del data[at : at + int(rng.integers(1, 40))]
            elif what == 2:
                other = files[rng.integers(len(files))]
                at = int(rng.integers(len(data)))
                data[at:at] = other[: int(rng.integers(1, 200))]
            for _ in range(int(rng.integers(0, 12))):
                if data:
                    data[rng.integers(0 if rng.random() < 0.05 else min(60, len(data) - 1), len(data))] = rng.integers(
                        256
                    )
            try:
                image = decoder.decode(bytes(data)).image
                code = "decoded"
                assert image.pixels.dtype == np.uint8
            except InputError as error:
                code = error.code
                assert error.remedy
            codes[code] = codes.get(code, 0) + 1
            if decoder.helper.process is not None:
                pids.add(decoder.helper.process.pid)
                if number % 50 == 0:
                    most = max(most, psutil.Process(decoder.helper.process.pid).memory_info().rss)
    print(codes, f"most {most / 2**20:.0f} MiB, {len(pids)} processes")
    assert set(codes) <= {"decoded", "image_format", "image_damaged", "image_too_large", "image_depth"}
    assert codes["decoded"] > 1500 and codes["image_damaged"] > 1500
    assert most < 1 << 30


def test_a_picture_of_pillow_is_the_image_of_its_file(decoder):
    data = file_of(transparent("RGBA"), "PNG")
    assert image_of(PIL.Image.open(io.BytesIO(data))) == decoder.decode(data).image
