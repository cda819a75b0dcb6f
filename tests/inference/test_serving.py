"""Tests of the resident predictor and its HTTP front: same results on any ranks, errors as JSON."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pydist.cli import main as cli
from pydist.comm import run_local
from pydist.data import ShardDataset, UniverseOptions, generate_universes
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.inference import Predictor, Sliding
from pydist.inference.loaded import load_network
from pydist.inference.resident import Resident
from pydist.inference.service import Busy, Closing, Service
from pydist.mesh import Mesh
from pydist.train.config import (
    Config,
    DataConfig,
    FactoryConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)
from support.training.runs import job

FACTORY = "pydist.models.pooled:PooledCosmoFlow"
SHAPE = (16, 24, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Trains a regression and a segmentation for a step each; returns the folder of both."""
    root = tmp_path_factory.mktemp("served")
    universes = UniverseOptions(count=4, width=8, box_width=8)
    generate_universes(root / "universes", universes)
    generate_ct(root / "ct", CTOptions(count=2, shape=SHAPE, validation=0.5))
    arguments = {"features": 2, "levels": 2}
    models = {
        "universes": FactoryConfig(factory=FACTORY, args=arguments, task="regression"),
        "ct": UNet3dConfig(features=2, levels=1),
    }
    for name, model in models.items():
        config = Config(
            model=model,
            data=DataConfig(root / name, "log1p" if name == "universes" else "ct"),
            train=TrainConfig(epochs=1, batch=1, steps=1),
            output=OutputConfig(root / f"run-{name}", plot=False),
        )
        run_local(job, 1, config)
    return root


def on_ranks(ranks: int, made, use, spatial=(1, 1, 1)):
    """Returns what `use` does of the first rank's resident, while the others follow."""

    def body(world):
        resident = made(Mesh(world, None, spatial))
        if world.rank:
            resident.follow()
            return None
        try:
            return use(resident)
        finally:
            resident.end()

    return run_local(body, ranks, timeout=60)[0]


def of_universes(folder):
    return lambda mesh: Resident(folder / "run-universes", mesh, factory=FACTORY)


def of_ct(folder, sliding=None):
    return lambda mesh: Resident(folder / "run-ct", mesh, sliding)


@pytest.mark.parametrize(("ranks", "spatial"), [(1, (1, 1, 1)), (3, (1, 1, 1)), (4, (2, 1, 1))])
def test_samples_are_dealt_out_to_groups(ranks, spatial, folder):
    data = ShardDataset(folder / "universes", "train", normalize="none")
    counts = [data[i][0].numpy() for i in range(3)] + [np.ones((4, 12, 8, 8))]

    def use(resident):
        assert resident.groups == ranks // spatial[0]
        return torch.stack(resident.predict([resident.prepared(x) for x in counts]))

    found = on_ranks(ranks, of_universes(folder), use, spatial)
    network = load_network(folder / "run-universes", FACTORY).network
    with torch.no_grad():
        plain = [torch.from_numpy(np.log1p(x.astype("float32"))) for x in counts]
        expected = torch.cat([network(x[None]) for x in plain])
    torch.testing.assert_close(found, expected)


def test_windows_on_any_ranks_are_those_of_one_device(folder):
    pytest.importorskip("monai")
    image = ShardDataset(folder / "ct", "train", normalize="none")[0][0].numpy()
    sliding = Sliding(12)
    use = lambda r: r.predict([r.prepared(image)])[0]  # noqa: E731
    one = on_ranks(1, of_ct(folder, sliding), use)
    torch.testing.assert_close(on_ranks(3, of_ct(folder, sliding), use), one)
    torch.testing.assert_close(on_ranks(2, of_ct(folder, sliding), use, (1, 2, 1)), one)
    labels = run_local(lambda w: Predictor(folder / "run-ct", Mesh(w), sliding).predict(image), 1)[
        0
    ]
    np.testing.assert_array_equal(one.argmax(0), labels)


def test_full_volumes_are_those_of_the_predictor(folder):
    image = ShardDataset(folder / "ct", "train", normalize="none")[0][0].numpy()
    labels = run_local(lambda w: Predictor(folder / "run-ct", Mesh(w)).predict(image), 1)[0]
    found = on_ranks(2, of_ct(folder), lambda r: r.predict([r.prepared(image)] * 3))
    for scores in found:
        np.testing.assert_array_equal(scores.argmax(0), labels)


@pytest.mark.parametrize(("ranks", "spatial"), [(2, (1, 1, 1)), (4, (2, 1, 1))])
@pytest.mark.parametrize("name", ["universes", "ct"])
def test_a_batch_norm_by_the_input_norms_each_item_by_itself(
    name, ranks, spatial, folder, tmp_path
):
    """Two groups compute three samples, or the windows of a volume."""
    of_voxels = name == "ct"
    factory = f"support.networks.batch_normed:of_{'voxels' if of_voxels else 'samples'}"
    config = Config(
        model=FactoryConfig(factory=factory, task="segmentation" if of_voxels else "regression"),
        data=DataConfig(folder / name, "ct" if of_voxels else "log1p"),
        train=TrainConfig(epochs=1, batch=1, steps=1),
        output=OutputConfig(tmp_path / "run", plot=False),
    )
    run_local(job, 1, config)
    sliding = Sliding(12, 0.5) if of_voxels else None
    data = ShardDataset(folder / name, "train", normalize="none")
    images = [data[0][0].numpy() * scale for scale in (1, 3, 9)]
    if of_voxels:
        images = [images[0][:, :, :, :12]]

    def use(resident):
        return resident.predict([resident.prepared(x) for x in images])

    def made(mesh):
        return Resident(tmp_path / "run", mesh, sliding, factory=factory)

    expected = on_ranks(1, made, use)
    torch.testing.assert_close(on_ranks(ranks, made, use, spatial), expected)
    if of_voxels:

        def body(world):
            predictor = Predictor(
                tmp_path / "run", Mesh(world, 2, spatial), sliding, factory=factory
            )
            return predictor.probabilities(images[0] if world.rank == 0 else None)

        found = torch.from_numpy(run_local(body, ranks)[0])
        torch.testing.assert_close(found, expected[0].softmax(0))
    else:
        loaded = load_network(tmp_path / "run", factory)
        inputs = [torch.from_numpy(np.log1p(x.astype("float32"))) for x in images]
        with torch.no_grad():
            torch.testing.assert_close(expected, [loaded.network(x[None])[0] for x in inputs])


def test_what_can_not_be_predicted_is_refused(folder, tmp_path):
    def use(resident):
        for image, message in [
            (np.zeros((3, 8, 8, 8)), r"\(3, 8, 8, 8\); the network accepts \[4, D, H, W\]"),
            (np.zeros((4, 8, 8)), r"accepts \[4, D, H, W\]"),
            (np.zeros((4, 0, 8, 8)), r"the shape \(4, 0, 8, 8\) has no voxels"),
            (np.full((4, 8, 8, 8), np.nan), "NaN at .*, which int16 does not have"),
            (np.full((4, 8, 8, 8), 1e9), "do not fit int16"),
        ]:
            with pytest.raises(DataError, match=message):
                resident.prepared(image)

    on_ranks(1, of_universes(folder), use)
    with pytest.raises(UsageError, match="sliding windows: factory predicts no classes of voxels"):
        on_ranks(
            1, lambda m: Resident(folder / "run-universes", m, Sliding(8), factory=FACTORY), use
        )
    with pytest.raises(DataError, match=r"\(15, 24, 16\) voxels; the network needs multiples of 2"):
        on_ranks(1, of_ct(folder), lambda r: r.prepared(np.zeros((1, 15, 24, 16))))
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        on_ranks(1, lambda m: Resident(tmp_path, m), use)


def test_a_shape_that_the_network_refuses_is_found_on_shapes(folder):
    def use(resident):
        class Picky(torch.nn.Module):
            def forward(self, x):
                if x.shape[2] > 8:
                    raise RuntimeError("too deep\nfor me")
                return x

        resident._on_shapes, resident._known = Picky(), {}
        resident.prepared(np.zeros((4, 8, 8, 8)))
        with pytest.raises(DataError, match=r"refuses the shape .*: RuntimeError: too deep$"):
            resident.prepared(np.zeros((4, 16, 8, 8)))

    on_ranks(1, of_universes(folder), use)


def test_requests_wait_up_to_a_limit_and_none_is_lost_at_the_end(folder):
    def use(resident):
        service = Service(resident, waiting=2)
        answers = [service.submit(np.ones((4, 8, 8, 8))) for _ in range(2)]
        with pytest.raises(Busy, match="2 requests are waiting"):
            service.submit(np.ones((4, 8, 8, 8)))
        answers[0].cancel()
        service.close()
        assert service.facts()["status"] == "ending"
        with pytest.raises(Closing):
            service.submit(np.ones((4, 8, 8, 8)))
        service.run()
        assert set(answers[1].result(0)["values"]) == {"Omega_m", "sigma_8", "N_spec", "H_0"}
        assert service.answered == 1

    def body(world):
        use(Resident(folder / "run-universes", Mesh(world), factory=FACTORY))

    run_local(body, 1, timeout=60)


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: bytes | None = None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers.get("content-type"), answer.read()
        finally:
            connection.close()


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, ",
        b"{'descr': '''<f4",
        b"-" * 9000 + b"1",
        b"{'descr': (), 'fortran_order': False, 'shape': (1,)}",
    ],
)
def test_a_damaged_header_is_an_error_of_the_body(header):
    pytest.importorskip("uvicorn")
    from pydist.inference.http import array_of

    with pytest.raises(DataError, match=r"the body is not the content of a \.npy file"):
        array_of(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


@pytest.mark.parametrize("ranks", [1, 2])
def test_http(ranks, folder):
    pytest.importorskip("uvicorn")
    from pydist.inference.http import NPY, HttpServer

    image = ShardDataset(folder / "ct", "train", normalize="none")[0][0].numpy()
    expected = on_ranks(1, of_ct(folder), lambda r: r.predict([r.prepared(image)])[0].argmax(0))

    def ask(server, service):
        client = Client(server.port)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: client.ask("POST", "/predict", npy(image)), range(6)))
        for status, kind, content in answers:
            assert (status, kind) == (200, NPY)
            np.testing.assert_array_equal(np.load(io.BytesIO(content)), expected)
        fortran = npy(np.asfortranarray(image.astype(">f4")))
        assert client.ask("POST", "/predict", fortran) == answers[0]
        cut, objects = npy(image)[:-1], npy(np.array([{}]), allow_pickle=True)
        nested = b"\x93NUMPY\x01\x00" + (3501).to_bytes(2, "little") + b"-" * 3500 + b"1"
        huge = npy(image).replace(b"(1, 16, 24, 16), ", b"(1, 16, 24, 99999999999), ")
        for method, path, body, status, message in [
            ("POST", "/predict", b"", 400, "not the content of a .npy file"),
            ("POST", "/predict", b"[[1]]", 400, "not the content of a .npy file"),
            ("POST", "/predict", cut, 400, "bytes for the shape (1, 16, 24, 16)"),
            ("POST", "/predict", huge, 400, "not the content of a .npy file"),
            ("POST", "/predict", nested, 400, "not the content of a .npy file"),
            ("POST", "/predict", objects, 400, "real numbers of up to 8 bytes are needed"),
            ("POST", "/predict", npy(image[:, 1:]), 400, "(15, 24, 16) voxels; the network needs"),
            ("POST", "/predict", npy(image * np.nan), 400, "NaN at (0, 0, 0, 0)"),
            ("POST", "/predict", npy(np.zeros(70_000)), 413, "more than 500000 bytes"),
            ("GET", "/predict", None, 405, "Method Not Allowed"),
            ("GET", "/none", None, 404, "Not Found"),
        ]:
            found, kind, content = client.ask(method, path, body)
            assert (found, kind) == (status, "application/json")
            assert message in json.loads(content)["error"]
        found, _, content = client.ask("GET", "/health")
        facts = json.loads(content)
        assert (found, facts["status"], facts["task"]) == (200, "ok", "segmentation")
        assert (facts["ranks"], facts["answered"], facts["channels"]) == (ranks, 7, 1)
        server.close()
        with pytest.raises(Closing):
            service.submit(image)

    def body(world):
        resident = Resident(folder / "run-ct", Mesh(world))
        if world.rank:
            return resident.follow()
        service = Service(resident)
        server = HttpServer(service, "127.0.0.1", 0, 500_000)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, server, service)
            asked.add_done_callback(lambda _: server.close())
            service.run(lambda: server.is_over)
            asked.result()
        return None

    run_local(body, ranks, timeout=60)


class Idle:
    """Stands in for a resident network that gets nothing to compute."""

    groups = 1

    def idle(self) -> None:
        """Tells nobody."""

    def end(self) -> None:
        """Ends nothing."""


@pytest.mark.parametrize("name", ["universes", "ct"])
def test_an_output_that_is_not_finite_is_an_error_of_its_request(name, folder):
    def use(resident):
        service = Service(resident)
        with torch.no_grad():
            next(resident.loaded.network.parameters()).fill_(float("nan"))
        shape = (4, 8, 8, 8) if name == "universes" else (1, *SHAPE)
        answers = [service.submit(np.ones(shape)) for _ in range(2)]
        service.close()
        service.run()
        for answer in answers:
            with pytest.raises(DataError, match="NaN"):
                answer.result(0)
        assert service.answered == 2

    on_ranks(1, (of_universes if name == "universes" else of_ct)(folder), use)


def test_a_body_that_stalls_does_not_keep_the_service_from_ending():
    pytest.importorskip("uvicorn")
    from pydist.inference.http import HttpServer

    service = Service(Idle())
    server = HttpServer(service, "127.0.0.1", 0, 10_000)
    with socket.create_connection((server.host, server.port), 30) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
        time.sleep(0.5)  # until the request is under way
        server.close()
        deadline = time.monotonic() + 20
        service.run(lambda: server.is_over or time.monotonic() > deadline)
        assert server.is_over
        assert client.recv(1000).startswith(b"HTTP/1.1 503 ")


def test_a_port_in_use_is_named(folder):
    pytest.importorskip("uvicorn")
    from pydist.inference.http import HttpServer

    def body(world):
        service = Service(Resident(folder / "run-ct", Mesh(world)))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"can't listen at 127.0.0.1:{port}"):
                HttpServer(service, "127.0.0.1", port, 1)

    run_local(body, 1, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overlap", "0.5"], "--overlap needs windows"),
        (["--port", "70000"], "--port 70000: 0 to 65535"),
        (["--waiting", "0"], "--waiting 0: at least 1"),
        (["--largest", "3"], "--largest 3: a size is expected"),
        (["-n", "3", "--spatial", "2", "1", "1"], "-n 3: multiples of 2"),
        (["--spatial", "0", "1", "1"], "at least 1 part"),
        ([], "no checkpoint here"),
    ],
)
def test_mistakes_of_the_command_are_named(arguments, message, tmp_path, capsys):
    pytest.importorskip("uvicorn")
    assert cli.main(["serve", str(tmp_path), *arguments]) in (2, 73)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
