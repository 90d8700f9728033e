"""Every metric, declared once: collectors fill these, dashboards and alert rules are generated from them.

Names follow Prometheus' conventions (base units, `_total`, `_ratio` within 0 and 1) and, after the prefix, vLLM's
where they mean the same. Label values come from closed sets only: a value outside its set is counted as "other".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OTHER: Final = "other"


class MetricType(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Section(StrEnum):
    """The dashboard that a metric belongs to."""

    MEMORY = "Memory"
    SHARING = "Sharing and prefix cache"
    SCHEDULING = "Scheduling"
    RPC = "RPC"
    DEVICE = "Device"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and all values it can have."""

    name: str
    values: tuple[str, ...]

    def bounded(self, value: str) -> str:
        """Return the value if the label can have it, else "other"."""
        return value if value in self.values else OTHER


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is the whole name as it is queried, but for a histogram's suffixes."""

    name: str
    type: MetricType
    section: Section
    help: str
    unit: str = ""
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in order."""
        return tuple(label.name for label in self.labels)

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names under which samples appear."""
        if self.type is MetricType.HISTOGRAM:
            return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
        return (self.name,)


LATENCY_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
AGE_BUCKETS: Final = (0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
COUNT_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

STATE: Final = Label("state", ("free", "cached", "private", "shared", "pinned", "in_flight"))
HOST_STATE: Final = Label("state", ("free", "private", "shared"))
BACKEND_USE: Final = Label("use", ("working", "steps", "staging"))
HOST_USE: Final = Label("use", ("tokens", "tail", "free"))
USE: Final = Label("use", ("tokens", "tail", "reserved", "cached", "held_back", "free"))
POLICY: Final = Label("policy", ("max", "pow2", "oracle"))
COUNTED: Final = Label("counted", ("physical", "logical"))
SOURCE: Final = Label("source", ("prompt", "recompute"))
DIRECTION: Final = Label("direction", ("in", "out"))
MODE: Final = Label("mode", ("recompute", "swap", OTHER))
PREEMPTION_REASON: Final = Label("reason", ("out_of_blocks", "quota", "step_failed", OTHER))
FAILURE_REASON: Final = Label("reason", ("out_of_blocks", "quota"))
FINISHED_REASON: Final = Label("finished_reason", ("stop", "length", "cancelled", "error", OTHER))
PHASE: Final = Label("phase", ("prefill", "decode"))
BACKEND: Final = Label("backend", ("cpu", "cuda", OTHER))
DTYPE: Final = Label("dtype", ("float32", "float16", "bfloat16", "int8", "float8_e4m3", OTHER))
KERNEL: Final = Label(
    "kernel",
    ("decode_step", "prefill_step", "attend", "write_kv", "copy_blocks", "merge_states", "linear", OTHER),
)
MIN_LENGTH: Final = Label("min_length", tuple(str(1 << k) for k in range(31)))
METHOD: Final = Label(
    "method",
    (
        *(
            f"KvCache/{name}"
            for name in [
                "GetCacheInfo",
                "Allocate",
                "Append",
                "Attend",
                "Step",
                "Fork",
                "Truncate",
                "Free",
                "SwapOut",
                "SwapIn",
                "GetSequence",
                "ListSequences",
                "GetUsage",
                "Audit",
            ]
        ),
        *(f"Generation/{name}" for name in ("Generate", "GetModelInfo", "Tokenize", "Detokenize")),
        OTHER,
    ),
)
CODE: Final = Label(
    "code",
    (
        *[
            "OK",
            "CANCELLED",
            "UNKNOWN",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "ABORTED",
            "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL",
            "UNAVAILABLE",
            "DATA_LOSS",
            "UNAUTHENTICATED",
        ],
        OTHER,
    ),
)


def _counter(name: str, section: Section, text: str, unit: str = "", labels: tuple[Label, ...] = ()) -> Metric:
    return Metric(f"pagedkv_{name}_total", MetricType.COUNTER, section, text, unit, labels)


def _gauge(name: str, section: Section, text: str, unit: str = "", labels: tuple[Label, ...] = ()) -> Metric:
    return Metric(f"pagedkv_{name}", MetricType.GAUGE, section, text, unit, labels)


def _histogram(
    name: str, section: Section, text: str, unit: str, buckets: tuple[float, ...], labels: tuple[Label, ...] = ()
) -> Metric:
    return Metric(f"pagedkv_{name}", MetricType.HISTOGRAM, section, text, unit, labels, buckets)


_MEMORY = (
    _gauge("cache_info", Section.MEMORY, "Always 1; says what the pool is.", labels=(BACKEND, DTYPE)),
    _gauge("pool_blocks", Section.MEMORY, "Blocks in the page pool.", "blocks"),
    _gauge("pool_bytes", Section.MEMORY, "Bytes of the page pool.", "bytes"),
    _gauge("block_size_tokens", Section.MEMORY, "Tokens one block holds.", "tokens"),
    _gauge("blocks", Section.MEMORY, "Blocks by state; the states sum to the pool.", "blocks", (STATE,)),
    _gauge("state_bytes", Section.MEMORY, "The same in bytes.", "bytes", (STATE,)),
    _gauge("memory_bytes", Section.MEMORY, "Bytes by use: tokens, or the cause of their waste.", "bytes", (USE,)),
    _gauge("kv_cache_usage_ratio", Section.MEMORY, "Share of the blocks that live sequences hold.", "ratio"),
    _gauge("token_occupancy_ratio", Section.MEMORY, "Share of all slots that hold a token.", "ratio"),
    _gauge("internal_fragmentation_ratio", Section.MEMORY, "Share of held slots without a token.", "ratio"),
    _gauge(
        "external_fragmentation_ratio",
        Section.MEMORY,
        "Share of the free blocks outside the largest run; fails no paged allocation.",
        "ratio",
    ),
    _gauge("largest_free_run_blocks", Section.MEMORY, "Most neighbouring ids that are free or cached.", "blocks"),
    _gauge(
        "free_runs",
        Section.MEMORY,
        "Runs of neighbouring free ids with a length from min_length up to twice that.",
        labels=(MIN_LENGTH,),
    ),
    _gauge(
        "contiguous_bytes",
        Section.MEMORY,
        "Bytes that the live sequences would take if each reserved one contiguous run.",
        "bytes",
        (POLICY,),
    ),
    _gauge("sequences", Section.MEMORY, "Live sequences on the device.", "sequences"),
    _gauge("swapped_sequences", Section.MEMORY, "Live sequences in the host pool.", "sequences"),
    _gauge("swapped_tokens", Section.MEMORY, "Tokens that they hold, each once.", "tokens"),
    _gauge("host_pool_blocks", Section.MEMORY, "Blocks in the host pool; 0 without one.", "blocks"),
    _gauge("host_pool_bytes", Section.MEMORY, "Bytes of the host pool.", "bytes"),
    _gauge("host_blocks", Section.MEMORY, "Host blocks by state; they sum to the host pool.", "blocks", (HOST_STATE,)),
    _gauge("host_state_bytes", Section.MEMORY, "The same in bytes.", "bytes", (HOST_STATE,)),
    _gauge("host_memory_bytes", Section.MEMORY, "Bytes of the host pool by use.", "bytes", (HOST_USE,)),
    _gauge(
        "backend_memory_bytes",
        Section.MEMORY,
        "Bytes that the backend holds besides the pools: arrays and device weights, repeated steps, pinned staging.",
        "bytes",
        (BACKEND_USE,),
    ),
    _gauge("tokens", Section.MEMORY, "Tokens held, each once (physical) or once a sequence.", "tokens", (COUNTED,)),
    _counter("allocated_blocks", Section.MEMORY, "Blocks taken from the pool.", "blocks"),
    _counter("released_blocks", Section.MEMORY, "Blocks given back by their last holder.", "blocks"),
    _counter("allocation_failures", Section.MEMORY, "Attempts to take blocks that failed.", "", (FAILURE_REASON,)),
    _counter("leases_expired", Section.MEMORY, "Sequences freed because nobody renewed their lease.", "sequences"),
    _counter("quarantined_blocks", Section.MEMORY, "Blocks an audit took out of use.", "blocks"),
    _counter("refused_releases", Section.MEMORY, "Releases of blocks that nobody held.", "blocks"),
)

_SHARING = (
    _gauge("held_blocks", Section.SHARING, "Blocks in at least one block table, each once.", "blocks"),
    _gauge("logical_blocks", Section.SHARING, "Entries of all block tables.", "blocks"),
    _gauge("sharing_factor", Section.SHARING, "Block table entries per held block; 1 without sharing."),
    _gauge("memory_saved_ratio", Section.SHARING, "Share of the tables' blocks that sharing saves.", "ratio"),
    _gauge("memory_saved_bytes", Section.SHARING, "Bytes that sharing saves.", "bytes"),
    _counter("prefix_cache_queries", Section.SHARING, "Prompt tokens looked up, at commit.", "tokens", (SOURCE,)),
    _counter("prefix_cache_hits", Section.SHARING, "Of those, tokens found.", "tokens", (SOURCE,)),
    _counter("published_blocks", Section.SHARING, "Full blocks that became findable.", "blocks"),
    _counter("evicted_blocks", Section.SHARING, "Cached blocks given up for new tokens.", "blocks"),
    _counter("copied_blocks", Section.SHARING, "Blocks copied on write.", "blocks"),
    _counter("deduplicated_blocks", Section.SHARING, "Blocks dropped for an equal older one.", "blocks"),
    _counter("hash_collisions", Section.SHARING, "Digests that matched while the tokens did not.", "blocks"),
    _histogram("kv_block_lifetime_seconds", Section.SHARING, "From publishing to eviction.", "seconds", AGE_BUCKETS),
    _histogram(
        "kv_block_idle_before_evict_seconds", Section.SHARING, "Unheld before eviction.", "seconds", AGE_BUCKETS
    ),
    _histogram(
        "kv_block_reuse_gap_seconds", Section.SHARING, "Unheld before being found again.", "seconds", AGE_BUCKETS
    ),
)

_SCHEDULING = (
    _gauge("num_requests_running", Section.SCHEDULING, "Generations in the batch.", "requests"),
    _gauge("num_requests_waiting", Section.SCHEDULING, "Generations that wait.", "requests"),
    _gauge("num_requests_swapped", Section.SCHEDULING, "Of those, preempted ones in host memory.", "requests"),
    _counter("requests_received", Section.SCHEDULING, "Generations accepted.", "requests"),
    _counter("request_success", Section.SCHEDULING, "Generations ended, by reason.", "requests", (FINISHED_REASON,)),
    _counter("prompt_tokens", Section.SCHEDULING, "Prompt tokens of accepted generations.", "tokens"),
    _counter("generation_tokens", Section.SCHEDULING, "Tokens generated.", "tokens"),
    _counter("computed_tokens", Section.SCHEDULING, "Tokens the model computed.", "tokens", (PHASE,)),
    _histogram(
        "request_queue_time_seconds",
        Section.SCHEDULING,
        "From acceptance to the first step.",
        "seconds",
        LATENCY_BUCKETS,
    ),
    _histogram(
        "time_to_first_token_seconds",
        Section.SCHEDULING,
        "From acceptance to the first token.",
        "seconds",
        LATENCY_BUCKETS,
    ),
    _histogram(
        "inter_token_latency_seconds", Section.SCHEDULING, "From one token to the next.", "seconds", LATENCY_BUCKETS
    ),
    _histogram("batch_size_sequences", Section.SCHEDULING, "Sequences in a step.", "sequences", COUNT_BUCKETS),
    _histogram("step_duration_seconds", Section.SCHEDULING, "Duration of a step.", "seconds", LATENCY_BUCKETS),
    _counter(
        "num_preemptions",
        Section.SCHEDULING,
        "Generations that lost their blocks.",
        "requests",
        (MODE, PREEMPTION_REASON),
    ),
    _counter("preempted_tokens", Section.SCHEDULING, "Computed tokens lost by preemption.", "tokens", (MODE,)),
    _counter("swapped_blocks", Section.SCHEDULING, "Blocks copied to or from host memory.", "blocks", (DIRECTION,)),
    _counter("swap_bytes", Section.SCHEDULING, "Bytes copied to or from host memory.", "bytes", (DIRECTION,)),
    _counter("swap_seconds", Section.SCHEDULING, "Time that these copies took.", "seconds", (DIRECTION,)),
)

_RPC = (
    _histogram("rpc_duration_seconds", Section.RPC, "Duration of calls.", "seconds", LATENCY_BUCKETS, (METHOD, CODE)),
    _counter("metric_errors", Section.RPC, "Faults inside the metrics themselves, see the log."),
)

_DEVICE = (
    _gauge("device_healthy", Section.DEVICE, "1 until the device fails."),
    _counter("kernel_seconds", Section.DEVICE, "Device time; a decode step is one.", "seconds", (KERNEL,)),
    _counter("kernel_launches", Section.DEVICE, "Kernel launches.", "", (KERNEL,)),
)

METRICS: Final[dict[str, Metric]] = {
    metric.name: metric for metric in (*_MEMORY, *_SHARING, *_SCHEDULING, *_RPC, *_DEVICE)
}
