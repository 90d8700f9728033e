"""Grafana dashboards: one a section of the metric registry, with a panel for each metric, and an overview by hand."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Dashboard, DataSourceRef

from monitoring.rules import RECORDING
from pagedkv.metrics.registry import METRICS, Metric, MetricType, Section

DATASOURCE = DataSourceRef(type_val="prometheus", uid="pagedkv-prometheus")
_RATE = "$__rate_interval"
_UNITS = {"bytes": "bytes", "ratio": "percentunit", "seconds": "s"}
_WHOLES = (  # their series sum to a pool
    "pagedkv_blocks",
    "pagedkv_state_bytes",
    "pagedkv_memory_bytes",
    "pagedkv_host_blocks",
    "pagedkv_host_state_bytes",
    "pagedkv_host_memory_bytes",
)
_TITLES = {Section.DEVICE: "GPU and other devices"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression with its legend."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `kind` is "lines", "stack" or "stat"."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "lines"


def panels_by_dashboard() -> dict[str, tuple[Panel, ...]]:
    """Return the panels of every dashboard by its title."""
    sections = {
        _TITLES.get(section, str(section)): tuple(
            metric_panel(metric) for metric in METRICS.values() if metric.section is section
        )
        for section in Section
    }
    return {"Overview": OVERVIEW, **sections}


def metric_panel(metric: Metric) -> Panel:
    """Return the panel that shows one metric."""
    title = metric.name.removeprefix("pagedkv_").removesuffix("_total").replace("_", " ").capitalize()
    legend = " ".join("{{" + name + "}}" for name in metric.label_names) or "{{instance}}"
    by = ", ".join(("instance", *metric.label_names))
    if metric.type is MetricType.HISTOGRAM:
        return Panel(title, metric.help, _UNITS.get(metric.unit, "short"), _quantiles(metric))
    if metric.type is MetricType.COUNTER:
        unit = "Bps" if metric.unit == "bytes" else "short"
        rate = Query(f"sum by ({by}) (rate({metric.name}[{_RATE}]))", legend)
        return Panel(f"{title} per second", metric.help, unit, (rate,))
    kind = "stack" if metric.name in _WHOLES else "lines"
    return Panel(title, metric.help, _UNITS.get(metric.unit, "short"), (Query(metric.name, legend),), kind)


def _quantiles(metric: Metric) -> tuple[Query, ...]:
    group = "method" if "method" in metric.label_names else None
    by = "le, method" if group else "le"
    legend = " {{method}}" if group else ""
    return tuple(
        Query(
            f"histogram_quantile({quantile}, sum by ({by}) (rate({metric.name}_bucket[{_RATE}])))",
            f"p{quantile * 100:g}{legend}",
        )
        for quantile in ((0.95,) if group else (0.5, 0.95, 0.99))
    )


def _stat(title: str, name: str, unit: str) -> Panel:
    return Panel(title, METRICS[name].help, unit, (Query(name, "{{instance}}"),), "stat")


def _recorded(title: str, description: str, names: tuple[str, ...]) -> Panel:
    assert all(name in RECORDING for name in names)
    return Panel(title, description, "percentunit", tuple(Query(name, name.split(":")[-1]) for name in names))


OVERVIEW: tuple[Panel, ...] = (
    _stat("Pool in use", "pagedkv_kv_cache_usage_ratio", "percentunit"),
    _stat("Slots holding tokens", "pagedkv_token_occupancy_ratio", "percentunit"),
    _stat("Internal fragmentation", "pagedkv_internal_fragmentation_ratio", "percentunit"),
    _stat("Saved by sharing", "pagedkv_memory_saved_bytes", "bytes"),
    _stat("Running", "pagedkv_num_requests_running", "short"),
    _stat("Waiting", "pagedkv_num_requests_waiting", "short"),
    metric_panel(METRICS["pagedkv_memory_bytes"]),
    Panel(
        "Paged against contiguous memory",
        "What is held, and what the same sequences would reserve from a contiguous allocator.",
        "bytes",
        (
            Query("pagedkv_held_blocks * on (instance, job) pagedkv_pool_bytes / pagedkv_pool_blocks", "paged"),
            Query("pagedkv_contiguous_bytes", "contiguous, {{policy}}"),
        ),
    ),
    Panel(
        "Tokens per second",
        "Tokens computed by phase, and generated.",
        "short",
        (
            Query(f"sum by (phase) (rate(pagedkv_computed_tokens_total[{_RATE}]))", "{{phase}}"),
            Query(f"sum(rate(pagedkv_generation_tokens_total[{_RATE}]))", "generated"),
        ),
    ),
    metric_panel(METRICS["pagedkv_time_to_first_token_seconds"]),
    metric_panel(METRICS["pagedkv_inter_token_latency_seconds"]),
    _recorded(
        "Prefix hit rate",
        "Share of the prompt tokens found in the prefix cache.",
        ("pagedkv:prefix_cache_hits:ratio_rate10m", "pagedkv:prefix_cache_hits:ratio_rate6h"),
    ),
    _recorded(
        "Computed tokens lost to preemption",
        "Tokens computed again because their blocks were taken.",
        ("pagedkv:preempted_tokens:ratio_rate5m",),
    ),
    _recorded(
        "Slow first tokens",
        "Share of first tokens later than the objective allows.",
        ("pagedkv:slow_first_tokens:ratio_rate5m", "pagedkv:slow_first_tokens:ratio_rate1h"),
    ),
)


def build(title: str, panels: tuple[Panel, ...]) -> Dashboard:
    """Return a dashboard as Grafana reads it."""
    builder = (
        dashboard.Dashboard(f"pagedkv: {title}")
        .uid(f"pagedkv-{slug(title)}")
        .tags(["pagedkv"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .readonly()
    )
    for panel in panels:
        builder = builder.with_panel(_build_panel(panel))
    return builder.build()


def _build_panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made: stat.Panel | timeseries.Panel
    if panel.kind == "stat":
        made = stat.Panel().span(4).height(4)
    else:
        made = timeseries.Panel().span(12).height(8).line_width(2).fill_opacity(8).show_points("never")  # type: ignore[arg-type]
        if panel.kind == "stack":
            made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60)
    made = made.title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        made = made.with_target(target.ref_id(chr(ord("A") + index)))
    return made


def slug(title: str) -> str:
    """Return a title as a file name."""
    return title.lower().replace(" ", "-")
