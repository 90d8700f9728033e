"""Recording and alert rules. An alert is conditions that must all hold, so that tests can evaluate their left sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BY = "instance, job"
FIRST_TOKEN_TARGET = "2.5"  # seconds, a bucket of the histogram
OBJECTIVE = 0.99  # share of first tokens within the target
WINDOWS = ("5m", "30m", "1h", "6h")


@dataclass(frozen=True)
class Condition:
    """`left operator right`."""

    left: str
    operator: str
    right: str

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right}"


@dataclass(frozen=True)
class Alert:
    """An alert rule."""

    name: str
    conditions: tuple[Condition, ...]
    summary: str
    action: str
    wait: str = "0m"
    severity: str = "warning"
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def expression(self) -> str:
        """The whole rule, for each instance by itself, whatever other labels a scrape adds."""
        return f" and on ({BY}) ".join(str(condition) for condition in self.conditions)

    def to_rule(self) -> dict[str, Any]:
        """Return the rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.wait,
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {"summary": self.summary, "action": self.action},
        }


def _rate(metric: str, window: str, matchers: str = "") -> str:
    return f"sum by ({BY}) (rate({metric}{matchers}[{window}]))"


def _slow_share(window: str) -> str:
    name = "pagedkv_time_to_first_token_seconds"
    within = _rate(f"{name}_bucket", window, f'{{le="{FIRST_TOKEN_TARGET}"}}')
    return f"1 - {within} / {_rate(f'{name}_count', window)}"


def _hit_ratio(window: str) -> str:
    matchers = '{source="prompt"}'
    hits = _rate("pagedkv_prefix_cache_hits_total", window, matchers)
    return f"{hits} / {_rate('pagedkv_prefix_cache_queries_total', window, matchers)}"


def _internal_errors(window: str) -> str:
    """No call ever failed: 0, not nothing."""
    name = "pagedkv_rpc_duration_seconds_count"
    failed, all_calls = _rate(name, window, '{code="INTERNAL"}'), _rate(name, window)
    return f"({failed} or 0 * {all_calls}) / {all_calls}"


RECORDING: dict[str, str] = {
    **{f"pagedkv:slow_first_tokens:ratio_rate{window}": _slow_share(window) for window in WINDOWS},
    "pagedkv:prefix_cache_hits:ratio_rate10m": _hit_ratio("10m"),
    "pagedkv:prefix_cache_hits:ratio_rate6h": _hit_ratio("6h"),
    "pagedkv:preempted_tokens:ratio_rate5m": (
        f"{_rate('pagedkv_preempted_tokens_total', '5m')} / {_rate('pagedkv_computed_tokens_total', '5m')}"
    ),
    "pagedkv:rpc_internal_errors:ratio_rate5m": _internal_errors("5m"),
    "pagedkv:accounting_faults:increase10m": (
        f"sum by ({BY}) (increase(pagedkv_quarantined_blocks_total[10m])"
        " + increase(pagedkv_refused_releases_total[10m]) + increase(pagedkv_metric_errors_total[10m]))"
    ),
}


def _burn(long: str, short: str, factor: float, severity: str) -> Alert:
    limit = f"{factor * (1 - OBJECTIVE):.3f}"
    return Alert(
        "PagedKvFirstTokensSlow",
        tuple(Condition(f"pagedkv:slow_first_tokens:ratio_rate{window}", ">", limit) for window in (long, short)),
        f"First tokens over {FIRST_TOKEN_TARGET} s use up the {OBJECTIVE:.0%} objective {factor:g} times too fast.",
        "Look at queue time, batch size and preemptions; send less, or give the pool more memory.",
        severity=severity,
        labels={"window": long},
    )


ALERTS: tuple[Alert, ...] = (
    Alert(
        "PagedKvDown",
        (Condition('up{job="pagedkv"}', "==", "0"),),
        "The service does not answer a scrape.",
        "Look at the process and its log.",
        wait="1m",
        severity="critical",
    ),
    Alert(
        "PagedKvDeviceFailed",
        (Condition("pagedkv_device_healthy", "==", "0"),),
        "The device failed; every generation is refused.",
        "Look at the log for the device's error and restart the service.",
        severity="critical",
    ),
    Alert(
        "PagedKvPoolPressure",
        (
            Condition("pagedkv_kv_cache_usage_ratio", ">", "0.95"),
            Condition("pagedkv_num_requests_waiting", ">", "0"),
        ),
        "Live sequences hold over 95 % of the pool while requests wait.",
        "Give the pool more memory or send fewer requests at once.",
        wait="5m",
    ),
    Alert(
        "PagedKvLeak",
        (
            Condition("min_over_time(pagedkv_held_blocks[30m])", ">", "0"),
            Condition(_rate("pagedkv_rpc_duration_seconds_count", "30m"), "==", "0"),
            Condition("max_over_time(pagedkv_num_requests_running[30m])", "==", "0"),
        ),
        "Blocks have been held for half an hour while no call came and nothing ran.",
        "Find the sequences on the page map; a client went without freeing them.",
        wait="10m",
    ),
    Alert(
        "PagedKvAccountingFault",
        (Condition("pagedkv:accounting_faults:increase10m", ">", "0"),),
        "A block was quarantined, released twice, or a figure was impossible.",
        "Run an audit and report what the log says: this is a bug.",
    ),
    Alert(
        "PagedKvThrash",
        (Condition("pagedkv:preempted_tokens:ratio_rate5m", ">", "0.2"),),
        "Over a fifth of the computed tokens are lost to preemption.",
        "Lower the number of sequences in the batch or give the pool more memory.",
        wait="5m",
    ),
    Alert(
        "PagedKvPrefixHitRateFell",
        (
            Condition("pagedkv:prefix_cache_hits:ratio_rate10m / pagedkv:prefix_cache_hits:ratio_rate6h", "<", "0.5"),
            Condition("pagedkv:prefix_cache_hits:ratio_rate6h", ">", "0.1"),
        ),
        "The prefix hit rate is under half of what it was over six hours.",
        "Look at evictions and idle times before eviction; has a shared prompt changed?",
        wait="10m",
    ),
    Alert(
        "PagedKvInternalErrors",
        (Condition("pagedkv:rpc_internal_errors:ratio_rate5m", ">", "0.01"),),
        "Over 1 % of the calls end INTERNAL.",
        "Search the log for the error ids that the callers got.",
        wait="2m",
        severity="critical",
    ),
    _burn("1h", "5m", 14.4, "critical"),
    _burn("6h", "30m", 6, "warning"),
)


def to_rule_files() -> dict[str, dict[str, Any]]:
    """Return the rule files by name."""
    recording = [{"record": name, "expr": expression} for name, expression in RECORDING.items()]
    return {
        "recording_rules.yml": {"groups": [{"name": "pagedkv-recording", "rules": recording}]},
        "alert_rules.yml": {"groups": [{"name": "pagedkv-alerts", "rules": [alert.to_rule() for alert in ALERTS]}]},
    }
