"""The commands: `pagedkv serve | generate | demo | top | doctor`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from pagedkv.cli.console import as_text, make_console
from pagedkv.cli.environment import drop_platform_variables
from pagedkv.cli.options import BACKENDS, DEFAULT_MEMORY, ServeOptions, load_config_file
from pagedkv.config import ACTIVATIONS, BLOCK_SIZES, HEAD_DIMS, PREEMPTION_MODES, KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument, PagedKvError
from pagedkv.unfinished import end_process

app = typer.Typer(
    name="pagedkv",
    help="A paged KV cache with attention, served over gRPC.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VARIABLES = {"auto_envvar_prefix": "PAGEDKV"}  # --drain-seconds is PAGEDKV_DRAIN_SECONDS, and so on


def _one_of(*values: object) -> dict[str, Any]:
    """Return what an option says of its values in the help and to the shell; ServeOptions refuses all others."""
    texts = [str(value) for value in values]

    def complete(incomplete: str) -> list[str]:
        return [text for text in texts if text.startswith(incomplete)]

    return {"autocompletion": complete, "metavar": f"[{'|'.join(texts)}]"}


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file; flags and PAGEDKV_* win over it.", callback=load_config_file, is_eager=True
    ),
]
Host = Annotated[str, typer.Option(help='Address to bind, or "unix:/path"; not loopback needs --insecure.')]
Port = Annotated[int, typer.Option(help="gRPC port; 0 takes a free one.")]
MetricsPort = Annotated[
    int,
    typer.Option(help="HTTP port of /metrics, /health, /ready, the page map; -1: off."),
]
BackendName = Annotated[str, typer.Option(help="Where K and V are kept and computed.", **_one_of(*BACKENDS))]
Blocks = Annotated[int | None, typer.Option(help="Blocks in the pool; wins over --memory.")]
Memory = Annotated[str, typer.Option(help='Pool size: "2GiB", or a share of the free memory, "0.5".')]
SwapBlocks = Annotated[int | None, typer.Option(help="Host blocks to swap to; wins over --swap-memory.")]
SwapMemory = Annotated[str | None, typer.Option(help='Host memory to swap to, as --memory: "512MiB" (default: none).')]
Preemption = Annotated[
    str | None,
    typer.Option(
        help="When blocks run out (default: swap if there is host memory to swap to, else recompute).",
        **_one_of(*PREEMPTION_MODES),
    ),
]
BlockSize = Annotated[int, typer.Option(help="Tokens a block.", **_one_of(*BLOCK_SIZES))]
KvDType = Annotated[DType, typer.Option("--dtype", help="How K and V are stored.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of one sequence (default: the model's).")]
MaxNumSeqs = Annotated[int, typer.Option(help="Most generations in the batch at once.")]
MaxBatchTokens = Annotated[int, typer.Option(help="Most tokens computed in one step.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: the cores this process may use).")]
Activations = Annotated[
    str,
    typer.Option(
        help="What linear layers over 4- and 8-bit weights round their inputs to on a CPU with AVX-512 VNNI: "
        "float32 (exact), int16 (faster; an error of 1.5e-5 of the largest of 32 neighbours) or int8 (fastest; 4e-3).",
        **_one_of(*ACTIVATIONS),
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedkv {version('pagedkv')}")
        raise typer.Exit


@app.callback()
def root(
    is_version_wanted: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A paged KV cache with attention, served over gRPC."""


@app.command(context_settings=_VARIABLES)
def serve(
    model: Annotated[str | None, typer.Argument(help="smollm2, a .gguf file, or a Hugging Face directory.")] = None,
    config: ConfigFile = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Serve the bare cache; give its shape.")] = False,
    layers: Annotated[int, typer.Option(help="With --no-model: layers.")] = 32,
    heads: Annotated[int, typer.Option(help="With --no-model: query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="With --no-model: KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="With --no-model: head dim.", **_one_of(*HEAD_DIMS))] = 128,
    host: Host = "127.0.0.1",
    port: Port = 50051,
    metrics_port: MetricsPort = 9400,
    backend: BackendName = "auto",
    blocks: Blocks = None,
    memory: Memory = DEFAULT_MEMORY,
    swap_blocks: SwapBlocks = None,
    swap_memory: SwapMemory = None,
    preemption: Preemption = None,
    block_size: BlockSize = 16,
    dtype: KvDType = DType.FLOAT32,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 64,
    max_batch_tokens: MaxBatchTokens = 512,
    threads: Threads = None,
    activations: Activations = "float32",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that is not loopback, without TLS.")
    ] = False,
    drain_seconds: Annotated[float, typer.Option(help="How long SIGTERM lets running streams go on.")] = 30.0,
) -> None:
    """Serve a model, or with --no-model the bare cache."""
    from pagedkv.cli.serve import run_serve

    options = ServeOptions(
        model=model,
        shape=KvShape(layers, heads, kv_heads, head_dim, dtype) if no_model else None,
        host=host.removeprefix("[").removesuffix("]"),
        port=port,
        metrics_port=None if metrics_port < 0 else metrics_port,
        backend=backend,
        blocks=blocks,
        memory=memory,
        swap_blocks=swap_blocks,
        swap_memory=swap_memory,
        preemption=preemption,
        block_size=block_size,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        threads=threads,
        activations=activations,
        insecure=insecure,
        drain_seconds=drain_seconds,
    )
    raise typer.Exit(run_serve(options))


@app.command(context_settings=_VARIABLES)
def generate(
    prompt: Annotated[str, typer.Argument(help='What to continue or, with --chat, to answer; "-": standard input.')],
    target: Annotated[str, typer.Option(help="Address of the service.")] = "127.0.0.1:50051",
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens up to this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Fixes the random stream.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given more than once.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say at the end, on standard error, why it ended, tokens and speeds.")
    ] = False,
) -> None:
    """Stream a generation from a running service."""
    from pagedkv.cli.generate import run_generate

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    stops = tuple(as_text(text, "stop") for text in stop or ())
    raise typer.Exit(run_generate(target, prompt, is_chat=chat, with_stats=stats, stop=stops, **sampling))


@app.command(context_settings=_VARIABLES)
def demo(
    question: Annotated[str, typer.Argument(help="What to ask the model.")] = "What is the capital of France?",
    threads: Threads = None,
) -> None:
    """Fetch SmolLM2-135M, serve it on a free port, stream an answer, say what the cache did, stop."""
    _end_on_interrupt()
    from pagedkv.cli.demo import run_demo

    asyncio.run(run_demo(as_text(question, "question"), threads))


@app.command(context_settings=_VARIABLES)
def top(
    url: Annotated[
        str, typer.Argument(envvar="PAGEDKV_METRICS_URL", help="The service's metrics address, URL or host:port.")
    ] = "http://127.0.0.1:9400",
) -> None:
    """Watch the page pool of a running service; q ends it."""
    from pagedkv.cli.top import run_top

    run_top(url)


@app.command(context_settings=_VARIABLES)
def doctor() -> None:
    """Report what this machine offers and compile every kernel."""
    _end_on_interrupt()
    from pagedkv.cli.doctor import run_doctor

    raise typer.Exit(run_doctor())


def _end_on_interrupt() -> None:
    """Have SIGINT end the process as SIGTERM does, at once: a compiler on another thread would be waited for."""
    signal.signal(signal.SIGINT, lambda number, frame: end_process(128 + number))


def run() -> int:
    """Run the command line and return its exit code; every mistake and error of ours is one line, not a traceback.

    2 is a mistake in what was asked, 1 that it could not be done.
    """
    console = make_console(stderr=True)
    drop_platform_variables(lambda line: console.print(escape(line), soft_wrap=True))
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.Abort:
        end_process(128 + signal.SIGINT)  # whatever threads are still at
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what reads our output has read enough
        return 1
    except _UsageError as error:
        print_error(console, InvalidArgument.reason, explain_usage(error))
        return 2
    except PagedKvError as error:
        print_error(console, error.reason, error.message)
        return 2 if isinstance(error, InvalidArgument) else 1
    return code if isinstance(code, int) else 0


_UsageError: Any = typer.BadParameter.__base__  # what every mistake on the command line is one of


def explain_usage(error: Any) -> str:
    """Return one line about a mistake on the command line or in a variable, whose value is shown."""
    text = " ".join(error.format_message().split())
    context: Any = error.ctx
    parameter: Any = getattr(error, "param", None)
    source: Any = context.get_parameter_source(parameter.name) if context and parameter else None
    if source is not None and source.name == "ENVIRONMENT":
        name = f"PAGEDKV_{parameter.name.upper()}"
        text += f" ({name}={os.environ.get(name)})"
    return text if context is None else f"{text}; see `{context.command_path} -h`"


def print_error(console: Console, reason: str, text: str) -> None:
    """Print one line of an error."""
    console.print(f"[bold red]error[/] [dim]{reason}[/] {escape(text)}", soft_wrap=True)
