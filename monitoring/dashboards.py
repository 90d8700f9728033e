"""Grafana dashboards: one a section of the metric registry, with a panel for each metric, and an overview by hand."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Dashboard, DataSourceRef, VariableOption, VariableRefresh

from monitoring.rules import RECORDING
from pagedkv.metrics.registry import METRICS, Metric, MetricType, Section

DATASOURCE_UID = "pagedkv-prometheus"  # as provisioned, and what a dashboard begins with
_CHOSEN = DataSourceRef(type_val="prometheus", uid="${datasource}")
_EVERY_SERVICE = "pagedkv_pool_blocks"  # a metric that each instance has, once
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


def select(name: str) -> str:
    """Return the series of a metric or rule that the dashboard's variables choose."""
    return f'{name}{{job=~"$job", instance=~"$instance"}}'


def _rate(name: str) -> str:
    return f"rate({select(name)}[{_RATE}])"


def metric_panel(metric: Metric) -> Panel:
    """Return the panel that shows one metric: a line for each instance, or the parts of a whole over all of them."""
    title = metric.name.removeprefix("pagedkv_").removesuffix("_total").replace("_", " ").capitalize()
    unit = _UNITS.get(metric.unit, "short")
    legend = " ".join("{{" + name + "}}" for name in ("instance", *metric.label_names))
    if metric.type is MetricType.HISTOGRAM:
        return Panel(title, metric.help, unit, _quantiles(metric))
    if metric.type is MetricType.COUNTER:
        by = ", ".join(("instance", *metric.label_names))
        rate = Query(f"sum by ({by}) ({_rate(metric.name)})", legend)
        return Panel(f"{title} per second", metric.help, "Bps" if metric.unit == "bytes" else "short", (rate,))
    if metric.name in _WHOLES:
        (part,) = metric.label_names
        parts = Query(f"sum by ({part}) ({select(metric.name)})", "{{" + part + "}}")
        return Panel(title, metric.help, unit, (parts,), "stack")
    return Panel(title, metric.help, unit, (Query(select(metric.name), legend),))


def _quantiles(metric: Metric) -> tuple[Query, ...]:
    group = "method" if "method" in metric.label_names else None
    by = "le, method" if group else "le"
    legend = " {{method}}" if group else ""
    return tuple(
        Query(
            f"histogram_quantile({quantile}, sum by ({by}) ({_rate(metric.name + '_bucket')}))",
            f"p{quantile * 100:g}{legend}",
        )
        for quantile in ((0.95,) if group else (0.5, 0.95, 0.99))
    )


def _stat(title: str, name: str, unit: str) -> Panel:
    return Panel(title, METRICS[name].help, unit, (Query(select(name), "{{instance}}"),), "stat")


def _recorded(title: str, description: str, names: tuple[str, ...]) -> Panel:
    assert all(name in RECORDING for name in names)
    queries = tuple(Query(select(name), "{{instance}} " + name.split(":")[-1]) for name in names)
    return Panel(title, description, "percentunit", queries)


_HELD_BYTES = f"{select('pagedkv_held_blocks')} * {select('pagedkv_pool_bytes')} / {select('pagedkv_pool_blocks')}"
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
            Query(f"sum({_HELD_BYTES})", "paged"),
            Query(f"sum by (policy) ({select('pagedkv_contiguous_bytes')})", "contiguous, {{policy}}"),
        ),
    ),
    Panel(
        "Tokens per second",
        "Tokens computed by phase, and generated.",
        "short",
        (
            Query(f"sum by (phase) ({_rate('pagedkv_computed_tokens_total')})", "{{phase}}"),
            Query(f"sum({_rate('pagedkv_generation_tokens_total')})", "generated"),
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
    for variable in _variables():
        builder = builder.with_variable(variable)
    for panel in panels:
        builder = builder.with_panel(_build_panel(panel))
    return builder.build()


def _variables() -> tuple[dashboard.DatasourceVariable | dashboard.QueryVariable, ...]:
    """Return what a viewer chooses: the data source, then jobs and instances, all of them to begin with."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    job = f"label_values({_EVERY_SERVICE}, job)"
    instance = f'label_values({_EVERY_SERVICE}{{job=~"$job"}}, instance)'
    return (
        source.current(VariableOption(selected=True, text="pagedkv", value=DATASOURCE_UID)),
        _label_variable("job", "Job", job),
        _label_variable("instance", "Instance", instance),
    )


def _label_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = VariableOption(selected=True, text="All", value="$__all")
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(_CHOSEN)
    variable = variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)  # an instance that came later is found
    return variable.multi(True).include_all(True).all_value(".+").current(everything)


def _build_panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made: stat.Panel | timeseries.Panel
    if panel.kind == "stat":
        made = stat.Panel().span(4).height(4)
    else:
        made = timeseries.Panel().span(12).height(8).line_width(2).fill_opacity(8).show_points("never")  # type: ignore[arg-type]
        if panel.kind == "stack":
            made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60)
    made = made.title(panel.title).description(panel.description).unit(panel.unit).datasource(_CHOSEN)
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        made = made.with_target(target.ref_id(chr(ord("A") + index)))
    return made


def slug(title: str) -> str:
    """Return a title as a file name."""
    return title.lower().replace(" ", "-")
