"""What is generated is fresh, and names nothing that does not exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from monitoring import generate
from monitoring.dashboards import Query, panels_by_dashboard
from monitoring.rules import ALERTS, RECORDING
from pagedkv.metrics.registry import METRICS, MetricType
from tests.monitoring.conftest import need

PROMETHEUS = Path(generate.__file__).parent / "prometheus"
SCRAPE_LABELS = {"instance", "job"}
SERIES = {name: metric for metric in METRICS.values() for name in metric.series_names}


DASHBOARDS = [json.loads(text) for name, text in generate.generate().items() if name.startswith("grafana/dashboards/")]
QUERIES = [(panel, query) for panels in panels_by_dashboard().values() for panel in panels for query in panel.queries]
REGEX = str(promql_parser.parse('a{b=~"c"}').matchers.matchers[0].op)


def parse(expression):
    return promql_parser.parse(expression.replace("$__rate_interval", "1m"))


def walk(node):
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None and hasattr(child, "prettify"):
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


def selectors(expression):
    return [node for node in walk(parse(expression)) if isinstance(node, promql_parser.VectorSelector)]


def unknown_names(expression):
    """Return every metric, label or label value of an expression that the registry does not know."""
    wrong, allowed = [], set(SCRAPE_LABELS)
    for selector in selectors(expression):
        if selector.name in RECORDING or selector.name == "up":
            continue
        metric = SERIES.get(selector.name)
        if metric is None:
            wrong.append(selector.name)
            continue
        known = {label.name: label.values for label in metric.labels}
        if metric.type is MetricType.HISTOGRAM:
            known["le"] = (*map(repr, metric.buckets), "+Inf")
        allowed |= known.keys()
        for matcher in selector.matchers.matchers:
            if matcher.name in SCRAPE_LABELS:
                continue
            if matcher.value not in known.get(matcher.name, ()):
                wrong.append(f"{selector.name}{{{matcher.name}={matcher.value}}}")
    grouped = {
        label
        for node in walk(parse(expression))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier
        for label in node.modifier.labels
    }
    return wrong + sorted(grouped - allowed)


ALL_EXPRESSIONS = {
    **{
        f"{title}: {panel.title}: {query.legend}": query.expression
        for title, panels in panels_by_dashboard().items()
        for panel in panels
        for query in panel.queries
    },
    **{f"record {name}": expression for name, expression in RECORDING.items()},
    **{f"alert {alert.name} {alert.labels.get('window', '')}": alert.expression for alert in ALERTS},
}


def test_generated_files_are_fresh():
    assert generate.stale_files() == []


@pytest.mark.parametrize("expression", ALL_EXPRESSIONS.values(), ids=ALL_EXPRESSIONS.keys())
def test_expression_names_only_declared_metrics_and_labels(expression):
    assert unknown_names(expression) == []


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(pagedkv_nothing_total[5m])", "pagedkv_nothing_total"),
        ('pagedkv_blocks{state="lost"}', "pagedkv_blocks{state=lost}"),
        ('pagedkv_blocks{mood="free"}', "pagedkv_blocks{mood=free}"),
        ("sum by (user) (pagedkv_blocks)", "user"),
        ('pagedkv_time_to_first_token_seconds_bucket{le="3"}', "pagedkv_time_to_first_token_seconds_bucket{le=3}"),
        ("pagedkv:nothing:ratio", "pagedkv:nothing:ratio"),
    ],
)
def test_unknown_metric_label_or_value_is_found(expression, wrong):
    assert unknown_names(expression) == [wrong]


def test_legends_use_labels_that_their_query_keeps():
    for panel, query in QUERIES:
        assert legend_labels(query) <= kept_labels(query), panel.title


def test_lines_of_each_instance_say_which_it_is():
    for panel, query in QUERIES:
        assert ("instance" in kept_labels(query)) == ("instance" in legend_labels(query)), panel.title


def test_every_query_is_of_the_jobs_and_instances_that_are_chosen():
    for panel, query in QUERIES:
        for selector in selectors(query.expression):
            chosen = {matcher.name: matcher.value for matcher in selector.matchers.matchers if str(matcher.op) == REGEX}
            assert chosen == {"job": "$job", "instance": "$instance"}, panel.title


def test_every_dashboard_lets_one_choose_data_source_job_and_instance():
    for dashboard in DASHBOARDS:
        variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
        assert list(variables) == ["datasource", "job", "instance"]
        assert variables["datasource"]["type"] == "datasource"
        for name in ("job", "instance"):
            assert variables[name]["current"]["value"] == "$__all"
            assert variables[name]["multi"]
            assert [selector.name for selector in selectors(label_values(variables[name], name))] == [
                "pagedkv_pool_blocks"
            ]


def test_everything_on_a_dashboard_is_read_from_the_data_source_that_is_chosen():
    for dashboard in DASHBOARDS:
        variables = [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
        assert {each["datasource"]["uid"] for each in (*dashboard["panels"], *variables)} == {"${datasource}"}
        assert not [target for panel in dashboard["panels"] for target in panel["targets"] if "datasource" in target]


def label_values(variable, label):
    """Return the selector of a variable's query, which is Grafana's function and not Prometheus'."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
    assert found[2] == label
    return found[1]


def legend_labels(query: Query):
    return {part.split("}}")[0] for part in query.legend.split("{{")[1:]}


def kept_labels(query: Query):
    if query.expression.startswith("histogram_quantile"):
        return set(re.search(r"sum by \(([^)]*)\)", query.expression)[1].split(", ")) - {"le"}
    if summed := re.match(r"sum(?: by \(([^)]*)\))? ?\(", query.expression):
        return set((summed[1] or "").split(", ")) - {""}
    names = [selector.name for selector in selectors(query.expression)]
    own = {label for name in names if name in SERIES for label in SERIES[name].label_names}
    return {"instance", *own}


def test_every_metric_has_a_panel():
    shown = {
        selector.name
        for panels in panels_by_dashboard().values()
        for panel in panels
        for query in panel.queries
        for selector in selectors(query.expression)
    }
    assert not [metric.name for metric in METRICS.values() if not shown & set(metric.series_names)]


def test_dashboards_have_unique_ids_and_panels_that_do_not_overlap():
    uids = []
    for name, text in generate.generate().items():
        if name.startswith("grafana/dashboards/"):
            dashboard = json.loads(text)
            uids.append(dashboard["uid"])
            cells = [
                (x, y)
                for panel in dashboard["panels"]
                for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
                for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
            ]
            assert len(cells) == len(set(cells))
            assert max(x for x, _ in cells) < 24
    assert len(uids) == len(set(uids)) == 6


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")],
    ids=["config", "rules"],
)
def test_promtool_accepts_config_and_rules(arguments):
    need("promtool")
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_rule_test_with_a_moment_of_silence():
    cases = [
        case
        for group in yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
        for case in group["alert_rule_test"]
    ]
    for alert in ALERTS:
        of_alert = [case for case in cases if case["alertname"] == alert.name]
        firing = [item for case in of_alert for item in case.get("exp_alerts", ())]
        assert firing, alert.name
        instances = {item["exp_labels"]["instance"] for item in firing}
        assert len(instances) < 4
        assert any(len(case.get("exp_alerts", ())) < len(instances) or not case.get("exp_alerts") for case in of_alert)
