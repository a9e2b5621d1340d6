"""Many sessions, one model: nobody's switches reach another, the queue is bounded, a full device recovers."""

import ast
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import dashboard.engine
from dashboard.engine.device import DeviceQueue, is_out_of_memory
from tests.dashboard.live_models import live_model, random_intervention, random_prompt, same_bits
from tide import Intervention
from tide.cli import UserError

PROMPT = (5, 9, 17, 9, 33, 60, 5, 21, 9)
THREADS, REQUESTS = 8, 50
MIB = 2**20


def test_threads_get_their_serial_results():
    rng = random.Random(0)
    prompts = [random_prompt(rng) for _ in range(20)]  # few enough for threads to meet on them
    wanted = [[(rng.choice(prompts), random_intervention(rng)) for _ in range(REQUESTS)] for _ in range(THREADS)]
    serial, shared = live_model(), live_model()

    def session(number):
        return [shared.run(*request) for request in wanted[number]]

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(session, range(THREADS)))
    for requests, runs in zip(wanted, results, strict=True):
        for request, run in zip(requests, runs, strict=True):
            serial.cache.clear()  # a whole forward of its own
            assert same_bits(run, serial.run(*request))


def test_sweeps_texts_and_runs_at_once_get_their_serial_results():
    serial, shared = live_model(), live_model()
    jobs = {
        "sweep": lambda live: live.sweep(PROMPT, 8, 33),
        "text": lambda live: list(live.generate(PROMPT, (Intervention(), Intervention.layers_off([0])), 20, 1.0, 3)),
        "run": lambda live: [live.surprisal(live.run(PROMPT, Intervention.layers_off([n % 3]))) for n in range(30)],
    }
    expected = {name: job(serial) for name, job in jobs.items()}
    with ThreadPoolExecutor(THREADS) as pool:
        found = [(name, pool.submit(job, shared)) for name, job in jobs.items() for _ in range(3)]
    for name, future in found:
        result = future.result()
        if name == "sweep":
            assert result.equals(expected[name])
        elif name == "text":
            assert result == expected[name]
        else:
            np.testing.assert_array_equal(result, expected[name])


def test_two_thousand_requests_leave_the_memory_as_it_was():
    live, rng = live_model(), random.Random(1)
    live.cache.limit_bytes = MIB // 2  # about 30 runs: nearly every request lets others go
    process = psutil.Process()

    def serve(count):
        for number in range(count):
            prompt = random_prompt(rng)
            run = live.run(prompt, random_intervention(rng))
            if number % 10 == 0:
                live.surprisal(run)
            if number % 200 == 0:
                list(live.generate(prompt, (Intervention(), random_intervention(rng)), 3))
                live.sweep(prompt, len(prompt) - 1, 7)
        return process.memory_info().rss

    before = serve(200)
    after = serve(2000)
    assert live.cache.nbytes <= MIB // 2
    assert after - before < 10 * MIB  # 5 KiB a request; a run that stayed would be 10 to 20


def test_requests_come_in_their_order_and_one_at_a_time():
    queue, order, inside = DeviceQueue(), [], []

    def ask(number):
        with queue.turn():
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            time.sleep(0.002)
            inside.remove(number)

    with queue.turn():
        threads = []
        for number in range(10):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            wait_until(lambda n=number: queue.waiting == n + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(10))


def test_a_job_that_comes_back_at_once_queues_behind_those_who_wait():
    queue, order = DeviceQueue(), []

    def ask():
        with queue.turn():
            order.append("other")

    with queue.turn():
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: queue.waiting == 1)
    with queue.turn(admitted=True):
        order.append("job")
    thread.join()
    assert order == ["other", "job"]


def test_one_more_than_may_wait_is_refused_and_a_job_under_way_is_not():
    queue = DeviceQueue(limit=2)

    def ask(admitted):
        with queue.turn(admitted):
            pass

    with queue.turn():
        threads = [threading.Thread(target=ask, args=(True,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: queue.waiting == 3)
        message = r"^The model is busy: 3 requests are waiting; try again in a moment\.$"
        with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match=message):
            pool.submit(ask, False).result()
    for thread in threads:
        thread.join()
    with queue.turn():
        assert queue.waiting == 0


def test_a_failure_gives_the_turn_back():
    queue = DeviceQueue()
    with pytest.raises(KeyError), queue.turn():
        raise KeyError
    with queue.turn():
        assert queue.waiting == 0


def test_a_turn_inside_a_turn_is_an_error_and_no_endless_wait():
    live = live_model()
    with pytest.raises(RuntimeError, match="this thread's turn already"):
        live.on_device(lambda: live.run(PROMPT))
    assert live.run(PROMPT)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_models_of_one_device_share_its_queue():
    assert live_model()._queue is live_model()._queue


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: not enough memory: you tried to allocate"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:12] or "bare")
@pytest.mark.parametrize("request_kind", ["run", "surprisal", "sweep", "generate", "log_probs"])
def test_a_full_device_is_freed_and_told_and_the_next_request_works(error, request_kind, monkeypatch):
    live = live_model()
    run = live.run(PROMPT)
    requests = {
        "run": lambda: live.run(PROMPT, Intervention.layers_off([1])),
        "surprisal": lambda: live.surprisal(run),
        "sweep": lambda: live.sweep(PROMPT, 8, 33),
        "generate": lambda: list(live.generate(PROMPT, [Intervention()], 4)),
        "log_probs": lambda: live.log_probs(run, 3),
    }
    module = live.model.model.layers[2].mlp if request_kind in ("run", "sweep", "generate") else live.model.lm_head

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", fail)
        with pytest.raises(UserError, match=r"^The memory of the device \(cpu\) ran out; what was kept .* try again"):
            requests[request_kind]()
    assert live.cache.nbytes == 0
    assert requests[request_kind]() is not None


def test_a_device_that_is_really_full_says_so_here_too():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    assert is_out_of_memory(caught.value)


def test_other_errors_stay_what_they_are(monkeypatch):
    live = live_model()
    monkeypatch.setattr(live.model.lm_head, "forward", lambda x: x @ torch.zeros(3, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        live.log_probs(live.run(PROMPT), 0)
    assert len(live.cache) == 1


def test_nothing_of_the_engine_knows_streamlit():
    for file in Path(dashboard.engine.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names.append(node.module or "" if isinstance(node, ast.ImportFrom) else "")
            assert not any(name.startswith("streamlit") for name in names), file.name
