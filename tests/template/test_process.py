"""The processes that render are few, replaced when they end, and end with who uses them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.waiting import until
from pagedkv.template.process import MAX_PROCESSES, RenderingFailed, TemplateProcesses


def render(processes: TemplateProcesses, content: str) -> str:
    messages = [{"role": "user", "content": content}]
    request = {"messages": messages, "add_generation_prompt": True, "continue_final_message": False}
    return processes.render(request)[0]


def children_of(processes: TemplateProcesses) -> list[subprocess.Popen]:
    return [process._child for process in processes._idle]


def test_many_threads_share_few_processes_and_get_their_own_text():
    processes = TemplateProcesses("<{{ messages[0].content }}>", {})
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda number: render(processes, f"{number}\u00e9"), range(60)))
    assert texts == [f"<{number}\u00e9>" for number in range(60)]
    assert len(children_of(processes)) <= MAX_PROCESSES


def test_process_that_ended_while_idle_is_replaced():
    processes = TemplateProcesses("{{ messages[0].content }}", {})
    assert render(processes, "a") == "a"
    (child,) = children_of(processes)
    child.kill()
    child.wait()
    assert render(processes, "b") == "b"
    assert child not in children_of(processes)


def test_process_ends_with_its_user():
    processes = TemplateProcesses("a", {})
    render(processes, "a")
    (child,) = children_of(processes)
    del processes
    gc.collect()
    assert child.returncode == -signal.SIGKILL
    assert child.stdin is not None
    assert child.stdin.closed


async def test_process_ends_when_the_server_is_killed():
    program = (
        "import os, sys, time; from pagedkv.template.process import TemplateProcesses; p = TemplateProcesses('a', {});"
        "p.render({'messages': [], 'add_generation_prompt': True, 'continue_final_message': False});"
        "print(p._idle[0]._child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    await until(lambda: not is_running(pid), "end of the process that renders")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_error_of_a_template_leaves_its_process_in_place():
    processes = TemplateProcesses("{{ messages[0].content.missing.thing }}", {})
    for _ in range(2):
        with pytest.raises(RenderingFailed, match="missing"):
            render(processes, "a")
    assert len(children_of(processes)) == 1


def test_what_a_template_sees_of_the_environment_is_where_modules_are(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    processes = TemplateProcesses("a", {})
    render(processes, "a")
    (child,) = children_of(processes)
    with open(f"/proc/{child.pid}/environ", "rb") as file:
        names = {entry.split(b"=")[0] for entry in file.read().split(b"\0") if entry}
    assert names == {b"PYTHONPATH", b"LC_ALL"}
