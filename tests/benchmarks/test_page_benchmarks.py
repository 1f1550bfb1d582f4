"""The benchmarks of pages are correct: every transferred byte is right, and wrong ones are detected."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import chain
from pathlib import Path

import pytest
from servers import RunningServer, start_redis, start_server

import kvpage_server
from benchmarks import shares
from benchmarks.findings import RESULTS, Finding
from benchmarks.pages import clients, single_commands
from benchmarks.pages.batches import absent
from benchmarks.pages.clients import Way, Wrong
from benchmarks.pages.command import KINDS
from benchmarks.pages.rounds import OPS, Contestant, Plan, Target, Trials, beside, compare
from benchmarks.pages.single_commands import lmcache_findings
from benchmarks.pages.tables import Found, with_tables
from benchmarks.pages.variants import twin_findings
from benchmarks.pages.work import ORDERS, SHORT, Work, blocks, mixed_pages, pages
from benchmarks.servers import start_kvpage
from kvpage_server.bench import SMOLLM2_16
from kvpage_server.page import decode_page

RANDOM = "random ids"


@pytest.fixture(scope="module")
def theirs() -> Iterator[RunningServer]:
    with start_redis() as server:
        yield server


@pytest.fixture(scope="module")
def ours() -> Iterator[RunningServer]:
    with start_server() as server:
        yield server


def run(way: Way) -> None:
    for write in way.writes:
        write()
    for number, read in enumerate(way.reads):
        read()
        way.check(number)


def works() -> list[Work]:
    return [pages(20, 1024, order) for order in ORDERS] + [mixed_pages(12, RANDOM)]


@pytest.mark.parametrize("order", ORDERS)
def test_no_page_has_the_name_or_the_body_of_another(order: str) -> None:
    work = pages(900, 1024, order)
    keys = [bytes(key) for batch in work.batches for key in batch.keys]
    assert len(set(keys)) == len(keys) == 900 * len(work.batches)
    bodies = [bytes(body) for batch in work.batches for body in batch.bodies]
    assert len(set(bodies)) == len(bodies)


def test_random_ids_have_one_to_ten_digits() -> None:
    (batch, *_) = pages(900, 1024, RANDOM).batches
    assert {len(key.req_id) for key in batch.keys} == set(range(1, 11))
    assert {len(str(key.page)) for key in batch.keys} == set(range(1, 11))


def test_both_key_orders_vary_the_layer_as_documented() -> None:
    slowly, fastest = ([key.layer for key in pages(64, 16, order).batches[0].keys] for order in list(ORDERS)[:2])
    assert slowly == sorted(slowly)
    assert fastest[:32] == list(range(32))


def test_mixed_bodies_are_short_and_long() -> None:
    lengths = [len(body) for body in mixed_pages(256, RANDOM).batches[0].bodies]
    assert lengths[3::4] == [SHORT] * 64
    long = [nbytes for nbytes in lengths if nbytes != SHORT]
    assert 1000 <= min(long) < 2000
    assert 200_000 < max(long) <= 300_000


@pytest.mark.parametrize("work", works(), ids=lambda work: work.name)
def test_the_ordinary_client_has_equal_keys_for_pages_and_values(
    work: Work, ours: RunningServer, theirs: RunningServer
) -> None:
    with ours.connect() as our_sock, theirs.connect() as their_sock:
        run(clients.kvpage_pages(our_sock, work))
        run(clients.values(their_sock, work))
    with ours.client() as our_client, theirs.client() as their_client:
        for key, body in zip(work.batches[3].keys, work.batches[3].bodies, strict=True):
            assert decode_page(our_client.get(bytes(key)))[1] == body
            assert their_client.get(bytes(key)) == bytes(body)


def test_page_client_moves_the_same_pages(ours: RunningServer, theirs: RunningServer) -> None:
    for server in (ours, theirs):
        with clients.connect_page_client(server.url) as client:
            for work in works():
                run(clients.page_client_pages(client, work))


def test_blocks_go_whole_and_as_the_pages_they_consist_of(ours: RunningServer, theirs: RunningServer) -> None:
    work = blocks(2, SMOLLM2_16)
    with ours.connect() as our_sock, theirs.connect() as their_sock:
        run(clients.kvpage_blocks(our_sock, work))
        run(clients.block_values(their_sock, work))
        run(clients.block_page_values(their_sock, work))
    with clients.connect_page_client(ours.url) as client:
        run(clients.page_client_blocks(client, work))


@pytest.mark.parametrize("count", [1, 3, 16])
def test_one_at_a_time_every_page_is_stored_once(count: int, ours: RunningServer, theirs: RunningServer) -> None:
    (batch, *_) = pages(20, 1024, RANDOM).batches
    for server, make in ((ours, single_commands.kvpage_way), (theirs, single_commands.value_way)):
        with server.client() as client:
            client.flushall()
            sockets = [server.connect() for _ in range(count)]
            way = make(sockets, batch)
            run(way)
            assert all(client.exists(bytes(key)) for key in batch.keys)
            assert client.dbsize() == len(batch.keys)
            if server is ours:
                words = *clients.name_words(batch.keys[7]), *clients.shape_words(1024)
                client.execute_command("KVPAGESET", *words, bytes(1024))
            else:
                client.set(bytes(batch.keys[7]), bytes(1024))
            with pytest.raises(Wrong, match="not those that were written"):
                way.check(0)
            for sock in sockets:
                sock.close()


def test_a_server_that_changes_a_byte_is_found_out(theirs: RunningServer) -> None:
    work = pages(20, 1024, RANDOM)
    with (
        theirs.connect() as sock,
        theirs.client() as client,
        clients.connect_page_client(theirs.url) as page_client,
        start_kvpage() as counted,
    ):
        for way in (clients.values(sock, work), clients.page_client_pages(page_client, work)):
            run(way)
            client.setrange(bytes(work.batches[2].keys[7]), 1023, b"\0")
            with pytest.raises(Wrong, match="not those that were written"):
                compare({"redis": Contestant(counted, way)}, "read", work.nbytes, Plan(quick=True), least=1)


def test_a_refused_write_is_found_out(ours: RunningServer) -> None:
    with ours.connect() as sock:
        way = clients.way(sock, [[clients.spell(b"GETX")]], [], [[]])
        with pytest.raises(Wrong, match="answered with b'-ERR"):
            way.writes[0]()


def test_absent_pages_are_expected_to_be_absent(ours: RunningServer) -> None:
    work = pages(4, 1024, "layers fastest")
    with ours.connect() as sock, ours.client() as client:
        client.flushall()
        present = clients.kvpage_pages(sock, work)
        present.writes[0]()
        keys = list(chain.from_iterable((key, absent(key)) for key in work.batches[0].keys))
        bodies = list(chain.from_iterable((body, None) for body in work.batches[0].bodies))
        way = clients.way(sock, [], [clients.kvpagemget(keys)], [bodies])
        way.reads[0]()
        way.check(0)
        backwards = clients.way(sock, [], [clients.kvpagemget(keys[::-1])], [bodies])
        backwards.reads[0]()
        with pytest.raises(Wrong):
            backwards.check(0)


def test_every_server_is_measured_in_every_round() -> None:
    work = pages(20, 4096, RANDOM)
    trials = Trials("one")
    with start_kvpage() as server, server.connect() as one, server.connect() as other:
        contestants = {
            name: Contestant(server, clients.kvpage_pages(sock, work))
            for name, sock in (("one", one), ("other", other))
        }
        for op in OPS:
            passes = compare(contestants, op, work.nbytes, Plan(), least=1)
            assert {name: len(rounds) for name, rounds in passes.items()} == {"one": 3, "other": 3}
            assert all(each.cpu_s_per_gb > 0 and each.gb_per_s > 0 for each in chain(*passes.values()))
            (cpu, speed) = beside(f"{op} it", passes, "one", "other", Target(cpu=1000, speed=0.0001))
            assert (cpu.met, speed.met) == (True, True)
            assert (cpu.what, speed.what) == ("CPU s/GB", "GB/s")
        trials.run("it", contestants, work.nbytes, Plan(quick=True), {"read": {"other": Target(cpu=0.0001)}}, least=1)
    assert [(each.work, each.what, each.met) for each in trials.findings()] == [
        ("write it", "CPU s/GB", None),
        ("write it", "GB/s", None),
        ("read it", "CPU s/GB", False),
        ("read it", "GB/s", None),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_row_can_be_measured(kind: str) -> None:
    assert list(signature(KINDS[kind].findings).parameters) == ["plan"]


def test_the_older_checkout_is_the_one_that_runs(tmp_path: Path) -> None:
    shutil.copytree(Path(kvpage_server.__file__).parent, tmp_path / "kvpage_server")
    (tmp_path / "kvpage_server" / "__init__.py").write_text('__version__ = "0.0.older"\n', encoding="utf-8")
    with start_kvpage(tree=tmp_path) as older, start_kvpage() as newer:
        assert older.name == "kvpage-server 0.0.older"
        assert newer.name == f"kvpage-server {kvpage_server.__version__}"


def test_a_missing_server_is_reported_and_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("LMCACHE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(lmcache_findings(Plan())) == []
    assert twin_findings(Plan()) == []
    output = capsys.readouterr().out
    assert "LMCACHE=... says where its command is" in output
    assert "--against TREE names one" in output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nonsense"], "there is no benchmark nonsense, only pages, "),
        (["pages", "--only", "batches,nonsense"], "there is no kind nonsense, only batches, "),
        (["profile", "--only", "nonsense"], "there is no path nonsense"),
    ],
)
def test_a_name_that_is_none_is_refused(words: list[str], error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 2
    assert error in done.stderr


def finding(value: float, at_most: float) -> Finding:
    return Finding("write it", "Valkey", "CPU s/GB", "1.0 / 2.0", value, at_most=at_most)


def test_measurements_are_inserted_between_the_marks() -> None:
    text = "before\n<!-- table: missed -->\nold\n<!-- end of table -->\nbehind\n"
    shown = with_tables(text, Found([finding(1.5, 1.0), finding(0.5, 1.0)]))
    assert shown.startswith("before\n<!-- table: missed -->\n\n| work | beside |")
    assert shown.endswith("| write it | Valkey | CPU s/GB | 1.0 / 2.0 | 1.5 | ≤ 1 |\n\n<!-- end of table -->\nbehind\n")
    assert with_tables(shown, Found([finding(0.5, 1.0)])) == text.replace("old", "\nNone.\n")


def test_a_quick_profile_prints_the_cost_and_stores_nothing() -> None:
    kept = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    words = [sys.executable, "-m", "benchmarks", "profile", "--quick", "--only", "write-64KiB"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "µs of the server's CPU a page" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == kept


REPORT = """
    50.00%  [kernel.kallsyms]  [k] _copy_to_iter
    20.00%  [kernel.kallsyms]  [k] tcp_ack
    10.00%  libpython3.11.so.1.0  [.] _PyEval_EvalFrameDefault
     5.00%  _xxhash.cpython-311-x86_64-linux-gnu.so  [.] XXHL64_seed_avx512
     5.00%  slots.cpython-311-x86_64-linux-gnu.so  [.] copy_into
     1.00%  libc.so.6  [.] __memmove_avx512_unaligned_erms
"""


def test_a_profile_is_split_into_parts() -> None:
    parts: Callable[[str], float] = shares.shares(shares.samples(REPORT)).__getitem__
    assert list(map(parts, shares.PARTS)) == [50.0, 20.0, 5.0, 5.0, 10.0, 1.0]
