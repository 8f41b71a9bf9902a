"""Downloads against a server on loopback: resuming, wrong and broken answers, and where requests may go."""

from __future__ import annotations

import hashlib
import io
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from protoseam.errors import DataError
from protoseam.lab.data import catalog, download, loading
from protoseam.lab.data.catalog import SourceFile

CONTENT = bytes(range(256)) * 1200
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Answers every request as `behave` says, and remembers the requests."""

    def __init__(self) -> None:
        self.ranges: list[str | None] = []
        self.behave: Callable[[BaseHTTPRequestHandler], None] = lambda handler: send(handler, CONTENT)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.ranges.append(self.headers.get("Range"))
                outer.behave(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def file(self, **changes: Any) -> SourceFile:
        return SourceFile(
            **{
                "name": "a.bin",
                "url": f"{self.address}a.bin",
                "size": len(CONTENT),
                "sha256": SHA256,
                **changes,
            }
        )


def send(
    handler: BaseHTTPRequestHandler, content: bytes, *, cut: int | None = None, ranges: bool = True
) -> None:
    start = 0
    asked = handler.headers.get("Range")
    if asked and ranges:
        start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    else:
        handler.send_response(200)
    handler.send_header("Content-Length", str(len(content) - start))
    handler.end_headers()
    handler.wfile.write(content[start:] if cut is None else content[start : start + cut])


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may leave the machine, whatever it means to do."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        assert address[0] in ("127.0.0.1", "::1"), f"a test tried to reach {address}"
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


def fetch(server: Server, folder: Path, file: SourceFile | None = None, **options: Any) -> Path:
    options.setdefault("allowed", server.address)
    return download.download(file or server.file(), folder, pause=lambda seconds: None, **options)


def test_a_whole_download(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = fetch(server, tmp_path / "new", report=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "new" / "a.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]
    assert fetch(server, tmp_path / "new") == path
    assert server.ranges == [None]  # the second call found it whole and asked for nothing


def test_a_broken_connection_is_resumed_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.behave = lambda handler: send(handler, CONTENT, cut=100_000)
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_a_later_call_resumes_too(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    server.behave = lambda handler: send(handler, CONTENT, ranges=False)
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_a_server_that_answers_with_another_range_starts_over(server: Server, tmp_path: Path) -> None:
    def from_the_start(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}")
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT)

    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    server.behave = from_the_start
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_complete_part_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges == []
    (tmp_path / "a.bin").rename(tmp_path / "a.bin.part")
    assert fetch(server, tmp_path, server.file(size=None)).read_bytes() == CONTENT  # the server says 416
    assert server.ranges == [f"bytes={len(CONTENT)}-"]


def test_a_part_of_something_else_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-", None]


def test_a_download_that_never_ends_well_says_how_to_go_on(server: Server, tmp_path: Path) -> None:
    server.behave = lambda handler: send(handler, CONTENT, cut=10)
    with pytest.raises(
        DataError, match=r"stopped after 40 of 307,200 bytes .*run the same command again"
    ) as caught:
        fetch(server, tmp_path)
    assert str(tmp_path / "a.bin") in str(caught.value)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:40]
    assert not (tmp_path / "a.bin").exists()


def test_wrong_content_is_deleted(server: Server, tmp_path: Path) -> None:
    server.behave = lambda handler: send(handler, CONTENT[::-1])
    with pytest.raises(DataError, match=f"and not {SHA256}"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_more_content_than_promised_is_cut_off(server: Server, tmp_path: Path) -> None:
    server.behave = lambda handler: send(handler, CONTENT + b"x")
    with pytest.raises(DataError, match="sent more than the 307,200 bytes"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_endless_answer_is_hung_up_on(server: Server, tmp_path: Path) -> None:
    sent, done = [0], threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while sent[0] < 512:
                handler.wfile.write(bytes(2**20))
                sent[0] += 1
        except OSError:
            pass  # the client has gone, as it should
        done.set()

    server.behave = endless
    with pytest.raises(DataError, match="sent more than"):
        fetch(server, tmp_path)
    assert done.wait(10)
    assert sent[0] < 100  # a few are in the buffers between the two
    assert list(tmp_path.iterdir()) == []


def test_404_names_the_file_to_place(server: Server, tmp_path: Path) -> None:
    server.behave = lambda handler: handler.send_error(404)
    with pytest.raises(DataError, match="answered with 404 Not Found") as caught:
        fetch(server, tmp_path)
    assert f"put it at {tmp_path / 'a.bin'} (SHA-256 {SHA256})" in str(caught.value)
    assert len(server.ranges) == 1


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    def busy_once(handler: BaseHTTPRequestHandler) -> None:
        send(handler, CONTENT) if len(server.ranges) > 1 else handler.send_error(503)

    server.behave = busy_once
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def redirect(handler: BaseHTTPRequestHandler, to: str) -> None:
    if handler.path == "/there":
        send(handler, CONTENT)
        return
    handler.send_response(302)
    handler.send_header("Location", to)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def test_redirects_are_followed_within_the_policy(server: Server, tmp_path: Path) -> None:
    server.behave = lambda handler: redirect(handler, "/there")
    assert fetch(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("to", ["http://127.0.0.1:9/a", "ftp://127.0.0.1/a", "file:///etc/passwd"])
def test_redirects_out_of_the_policy_are_refused(server: Server, tmp_path: Path, to: str) -> None:
    server.behave = lambda handler: redirect(handler, to)
    with pytest.raises(DataError, match=r"refused|not allowed"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_https_is_the_default_and_holds_for_redirects(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only https:// addresses"):
        fetch(server, tmp_path, allowed="https://")
    assert server.ranges == []
    redirects, body = download._CheckedRedirects("https://"), io.BytesIO()
    request = urllib.request.Request("https://example.org/a")
    with pytest.raises(DataError, match=r"http://example\.org/a refused"):
        redirects.redirect_request(request, body, 302, "", {}, "http://example.org/a")
    followed = redirects.redirect_request(request, body, 302, "", {}, "https://example.org/b")
    assert followed is not None
    assert followed.full_url == "https://example.org/b"


@pytest.mark.parametrize(
    "url", ["http://a.org/x", "ftp://a.org/x", "file:///x", "https://", "x", "HTTP://a.org"]
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(DataError, match="refused"):
        download.require_address(url)


def test_offline_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def no_network(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(DataError, match="if this machine is offline, fetch it by other means") as caught:
        loading.load("cifar10", tmp_path, download=True)
    assert str(tmp_path / "cifar-10-binary.tar.gz") in str(caught.value)
    assert len(tries) == 1
    with pytest.raises(DataError, match="protoseam data get cifar10"):
        loading.load("cifar10", tmp_path)  # not asked to download: says where the files go, and asks nobody
    assert len(tries) == 1


def test_without_a_known_checksum_the_user_must_bring_one(server: Server, tmp_path: Path) -> None:
    unknown = server.file(sha256=None, size=None)
    with pytest.raises(DataError, match=r"no checksum is known for a\.bin"):
        fetch(server, tmp_path, unknown)
    with pytest.raises(DataError, match="64 hexadecimal digits"):
        fetch(server, tmp_path, unknown, sha256="1234")
    assert server.ranges == []
    assert fetch(server, tmp_path, unknown, sha256=SHA256.upper()).read_bytes() == CONTENT
    other = server.file(
        name="b.bin", sha256="0" * 64, size=1
    )  # republished: the user's own hash overrides both
    assert fetch(server, tmp_path, other, sha256=SHA256).read_bytes() == CONTENT


def test_a_file_that_is_there_but_different_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="move it away"):
        fetch(server, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"mine"
    assert server.ranges == []


def test_a_folder_that_cannot_be_made_says_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="choose another with PROTOSEAM_DATA"):
        fetch(server, tmp_path / "file" / "sub")


def test_a_disk_without_room_says_so(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="free some space"):
        fetch(server, tmp_path, server.file(size=2**60))
    assert server.ranges == []


def test_progress_as_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with download.progress("a.bin") as report:
        for done in range(0, 1001, 10):
            report(done * 1000, 1_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "a.bin: 1.0 of 1.0 MB (100%)"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with download.progress("a.bin") as report:
        report(10, 20)
    assert "a.bin" in capsys.readouterr().err


def test_load_with_download_fetches_decodes_and_then_needs_no_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miniature_files import write_idx

    write_idx(tmp_path / "remote", compressed=True)
    files = []
    for path in sorted((tmp_path / "remote").iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(SourceFile(path.name, server.address + path.name, path.stat().st_size, digest))
    entry = catalog.Entry(
        "mnist",
        "",
        10,
        tuple("0123456789"),
        20,
        10,
        (28, 28, 1),
        (catalog.Source("idx", tuple(files)),),
        ("mnist",),
    )
    monkeypatch.setattr(catalog, "find", lambda name: entry)
    monkeypatch.setattr(
        loading,
        "download_file",
        lambda *a, **k: download.download(*a, **k, allowed=server.address, pause=lambda s: None),
    )
    server.behave = lambda handler: send(handler, (tmp_path / "remote" / handler.path[1:]).read_bytes())
    dataset = loading.load("mnist", tmp_path / "root", download=True)
    assert dataset.train_images.shape == (20, 28, 28, 1)
    assert len(server.ranges) == 4
    (
        tmp_path / "root" / "mnist" / files[0].name
    ).unlink()  # one of four is lost: what was decoded still serves
    assert loading.load("mnist", tmp_path / "root", download=True).train_images.shape == (20, 28, 28, 1)
    assert len(server.ranges) == 4
