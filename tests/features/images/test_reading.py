"""What users give for images becomes images; addresses are fetched from named hosts, at public addresses only."""

from __future__ import annotations

import base64
import http.server
import io
import shutil
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager

import numpy as np
import PIL.Image
import pytest
from tiny_vision import drawing

from prefold.errors import InputError
from prefold.features.images import reading as fetch_module
from prefold.features.images.decode import Decoder, Image, Limits
from prefold.features.images.reading import MediaHosts, Reader

PICTURE = PIL.Image.fromarray(drawing(0, 12, 17))
sink = io.BytesIO()
PICTURE.save(sink, "PNG")
DATA = sink.getvalue()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of example.test, and what trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    command += ["-subj", "/CN=example.test", "-addext", "subjectAltName=DNS:example.test,DNS:other.test"]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


class Pages(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        type(self).asked.append(f"{self.headers['host']}{self.path}")
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(200_000))
        else:
            self.send_response(200 if self.path.startswith("/a.png") else 404)
            self.end_headers()
            self.wfile.write(DATA)

    def log_message(self, *_):
        pass


@contextmanager
def pages(certificate):
    """Yields (port, paths that were asked for) of an https server."""
    handler = type("Handler", (Pages,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_address[1], handler.asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hosts(certificate, monkeypatch):
    """hosts(addresses, names, ...) -> MediaHosts that look names up in `addresses`; 127.0.0.1 passes for public where
    it stands as "public"."""
    create = fetch_module.socket.create_connection
    monkeypatch.setattr(
        fetch_module.socket, "create_connection",
        lambda where, **options: create(("127.0.0.1", where[1]), **options),
    )  # fmt: skip

    def make(addresses, names=("example.test",), **options):
        return MediaHosts(
            frozenset(names),
            resolve=lambda host, port: [a for a in addresses[host]],
            context=lambda: ssl.create_default_context(cafile=certificate[1]),
            **options,
        )

    return make


PUBLIC = {"example.test": ["93.184.216.34"], "other.test": ["93.184.216.34"]}


def test_a_named_host(certificate, hosts):
    with pages(certificate) as (port, asked):
        reader = Reader(hosts=hosts(PUBLIC))
        found = reader.read(f"https://example.test:{port}/a.png?x=1")
        np.testing.assert_array_equal(found.image.pixels, np.array(PICTURE))
        assert asked == [f"example.test:{port}/a.png?x=1"]
        assert reader.read(f"https://example.test:{port}/to//a.png").image == found.image
        reader.decoder.close()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1", "fc00::1", "100.64.0.1",
     "::ffff:127.0.0.1", "2002:7f00:1::", "224.0.0.1"],
)  # fmt: skip
def test_addresses_that_are_not_public(certificate, hosts, address):
    with pages(certificate) as (port, asked):
        for addresses in ([address], ["93.184.216.34", address]):
            with pytest.raises(InputError, match="not a public one") as error:
                hosts({"example.test": addresses}).fetch(f"https://example.test:{port}/a.png", "image", 10**6)
            assert error.value.code == "image_address"
        assert not asked


def test_every_redirect_is_checked(certificate, hosts):
    with pages(certificate) as (port, asked):
        base = f"https://example.test:{port}/to/"
        for target, message in (
            (f"https://other.test:{port}/a.png", "not an allowed host"),
            (f"http://example.test:{port}/a.png", "not https"),
            ("file:///etc/passwd", "not https"),
            (f"https://user@example.test:{port}/a.png", "not https"),
        ):
            with pytest.raises(InputError, match=message):
                hosts(PUBLIC).fetch(base + target, "image", 10**6)
        private = PUBLIC | {"other.test": ["10.1.2.3"]}
        with pytest.raises(InputError, match="not a public one"):
            hosts(private, ("example.test", "other.test")).fetch(f"{base}https://other.test:{port}/a.png", "i", 10**6)
        with pytest.raises(InputError, match="more than 5 times"):
            hosts(PUBLIC).fetch(f"{base}/to//to//to//to//to//a.png", "image", 10**6)
        assert not any("other" in one.partition("/")[0] for one in asked)


def test_limits_of_a_fetch(certificate, hosts):
    with pages(certificate) as (port, _):
        base = f"https://example.test:{port}"
        with pytest.raises(InputError, match="more than 100,000 bytes"):
            hosts(PUBLIC).fetch(base + "/large", "image", 100_000)
        with pytest.raises(InputError, match=r"did not answer in 0\.3 s"):
            hosts(PUBLIC, seconds=0.3).fetch(base + "/slow", "image", 10**6)
        with pytest.raises(InputError, match="status 404"):
            hosts(PUBLIC).fetch(base + "/none", "image", 10**6)


def test_nothing_is_fetched_by_default():
    reader = Reader()
    for url, message in (
        ("https://example.test/a.png", "--allow-media-host"),
        ("http://example.test/a.png", "never read"),
        ("file:///etc/passwd", "never read"),
        ("ftp://example.test/a.png", "never read"),
    ):
        with pytest.raises(InputError, match=message):
            reader.read(url)
    with pytest.raises(InputError, match=r"example\.test, or allow"):
        MediaHosts(frozenset({"example.test"})).fetch("https://www.example.test/", "image", 10)


def test_files_larger_than_the_limit(tmp_path):
    (tmp_path / "a.png").write_bytes(DATA)
    with Decoder(Limits(file_bytes=len(DATA) - 1)) as decoder:
        for value in (DATA, str(tmp_path / "a.png"), tmp_path / "a.png"):
            with pytest.raises(InputError, match="more than"):
                Reader(decoder).read(value)


def test_names_that_no_file_has(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for folder in (None, tmp_path):
        for name in ("a\0.png", "\ud800.png", "x" * 5000 + ".png", str(tmp_path / "a")):
            with pytest.raises(InputError, match="is the path") as error:
                Reader(folder=folder).read(name)
            assert error.value.code == "image_address"


def test_an_array_is_its_owners():
    pixels = np.array(PICTURE)
    image = Reader().read(pixels).image
    pixels[:] = 0
    np.testing.assert_array_equal(image.pixels, np.array(PICTURE))


def test_other_values():
    with Decoder() as decoder:
        reader = Reader(decoder)
        image = Image(np.array(PICTURE))
        assert reader.read(image).image is image
        assert reader.read(PICTURE).image == reader.read({"image": np.array(PICTURE)}).image == image
        assert reader.read({"bytes": DATA}).image == image
        for value, message in ((None, "None, not an image"), (5, "of type int"), ({}, "neither a url"), ("\0", "path")):
            with pytest.raises(InputError, match=message) as error:
                reader.read(value, "images[1]")
            assert error.value.field == "images[1]"


def test_a_long_text_that_is_no_base64_is_read_in_linear_time():
    """A pattern that goes back over white space does not end with a million letters of it, and holds all threads."""
    with Decoder() as decoder:
        reader = Reader(decoder, paths=False)
        for tail in ("!", "=" * 3, "= =", "==" + " " * 1_000_000 + "="):
            with pytest.raises(InputError, match="is a path"):
                reader.read("A" * 64 + " " * 1_000_000 + tail)
        text = base64.b64encode(DATA).decode()
        assert reader.read(f"{text[:40]}\n{text[40:]} \n").image == reader.read(DATA).image


@pytest.mark.parametrize(
    "picture",
    [
        PIL.Image.open(io.BytesIO(DATA[:-100])),  # which Pillow reads when its pixels are asked for
        PIL.Image.new("La", (3, 3)),
        PIL.Image.new("RGB", (0, 3)),
    ],
    ids=["cut off", "La", "no pixels"],
)
def test_pictures_that_cannot_be_read(picture):
    with pytest.raises(InputError, match=r"'images\[2\]' is a damaged") as caught:
        Reader().read(picture, "images[2]")
    assert (caught.value.field, caught.value.code) == ("images[2]", "image_damaged")
