"""A real Prometheus scrapes the running service; every panel and every rule must find data there."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml

from monitoring.dashboards import panels_by_dashboard
from monitoring.generate import prometheus_config
from monitoring.rules import ALERTS, RECORDING
from pagedkv.metrics.registry import METRICS
from tests.metrics.support import fetch, of, parse, value
from tests.monitoring.conftest import MixedLoad, need
from tests.monitoring.test_generated import PROMETHEUS


def as_grafana_asks(expression, *, instance=".+"):
    """Return an expression with the variables of Grafana's and of the dashboard's replaced."""
    values = {"$__rate_interval": "1m", "$job": ".+", "$instance": instance}
    return re.sub(r"\$\w+", lambda found: values[found[0]], expression)


PANELS = {
    f"{title}: {panel.title}: {query.legend}": query.expression
    for title, panels in panels_by_dashboard().items()
    for panel in panels
    for query in panel.queries
}
EXPRESSIONS = {
    **{name: as_grafana_asks(expression) for name, expression in PANELS.items()},
    **{f"record {name}": name for name in RECORDING},
    **{f"{alert.name}: {condition.left}": condition.left for alert in ALERTS for condition in alert.conditions},
}


class Prometheus:
    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path, **parameters):
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=600) as response:
            return json.load(response)["data"]

    def query(self, expression):
        return self.get("query", query=expression)["result"]

    def wait_for(self, is_there, what, seconds=120):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if is_there():
                    return
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.2)
        raise AssertionError(f"no {what} within {seconds} s")


def start_prometheus(folder, log):
    """Return a ready Prometheus and its reader; another program may take the free port before it, so tries some."""
    for _ in range(5):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["prometheus", f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder}/data"]
        process = subprocess.Popen([*command, f"--config.file={folder}/prometheus.yml"], stderr=log, stdout=log)
        reader = Prometheus(port)
        reader.wait_for(lambda p=process, r=reader: p.poll() is not None or r.query("vector(1)"), "start of Prometheus")
        if process.poll() is None:
            return process, reader
    raise AssertionError(f"Prometheus does not start; see {folder}/log")


@pytest.fixture(scope="module")
def prometheus(service, tmp_path_factory):
    """A Prometheus that has seen some seconds of mixed load, and the number of the load's rounds."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    for name in ("recording_rules.yml", "alert_rules.yml"):
        shutil.copy(PROMETHEUS / name, folder)
    target = service.metrics_url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus_config(target, "1s")))
    log = (folder / "log").open("w")
    process, reader = start_prometheus(folder, log)
    try:
        with MixedLoad(service.address, crowd=True) as load:
            preempted = 'pagedkv_num_preemptions_total{mode="swap"} > 0'
            reader.wait_for(lambda: reader.query(preempted), f"preemption by swap; see {folder}/log")
            ready = "count_over_time(pagedkv:slow_first_tokens:ratio_rate5m[1m]) > 2"
            reader.wait_for(lambda: reader.query(ready), f"data; see {folder}/log")
            reader.wait_for(lambda: load.rounds > 2, "rounds of the load")
            reader.rounds = load.rounds
            yield reader
    finally:
        process.terminate()
        process.wait(60)
        log.close()


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_expression_returns_data_of_the_running_service(prometheus, expression):
    assert prometheus.query(expression), expression


def test_panels_show_the_instance_that_is_chosen_and_no_other(service, prometheus):
    chosen = service.metrics_url.removeprefix("http://").rstrip("/")
    for name, expression in PANELS.items():
        assert prometheus.query(as_grafana_asks(expression, instance=chosen)), name
        assert prometheus.query(as_grafana_asks(expression, instance="elsewhere:1")) == [], name


def test_variables_find_the_service(service, prometheus):
    selector = 'pagedkv_pool_blocks{job=~".+"}'
    (series,) = prometheus.get("series", **{"match[]": selector})
    assert series["job"] == "pagedkv"
    assert series["instance"] in service.metrics_url


def test_states_sum_to_the_pool_at_every_scrape_under_load(prometheus):
    assert prometheus.rounds > 0
    sums = prometheus.query("(sum by (instance) (pagedkv_blocks) - on (instance) pagedkv_pool_blocks)[1m:1s]")
    differences = {float(number) for series in sums for _, number in series["values"]}
    assert differences == {0}


def test_host_states_sum_to_the_host_pool_at_every_scrape_under_load(prometheus):
    sums = prometheus.query("(sum by (instance) (pagedkv_host_blocks) - on (instance) pagedkv_host_pool_blocks)[1m:1s]")
    assert {float(number) for series in sums for _, number in series["values"]} == {0}
    assert prometheus.query("max_over_time(pagedkv_swapped_sequences[1m]) > 0")


def test_prometheus_sees_the_service_up_with_no_rule_failing(prometheus):
    prometheus.wait_for(lambda: prometheus.query("up")[0]["value"][1] == "1", "scrape that succeeds within its second")
    groups = prometheus.get("rules")["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
    firing = {rule["name"] for group in groups for rule in group["rules"] if rule.get("state") == "firing"}
    assert firing <= {"PagedKvFirstTokensSlow"}  # it says how busy the machine is, which is none of this test's


def test_counters_of_the_load_have_arrived(service, prometheus):
    samples = parse(fetch(service.metrics_url + "/metrics")[1].decode())
    assert value(samples, "pagedkv_generation_tokens_total") > 0
    assert of(samples, "pagedkv_request_success_total")["cancelled",] > 0
    assert value(samples, "pagedkv_copied_blocks_total") > 0
    for direction in ("out", "in"):
        assert value(samples, "pagedkv_rpc_duration_seconds_count", f"KvCache/Swap{direction.title()}", "OK") > 0
        assert value(samples, "pagedkv_swap_bytes_total", direction) > 0
        assert value(samples, "pagedkv_swap_seconds_total", direction) > 0
    assert value(samples, "pagedkv_preempted_tokens_total", "swap") == 0
    assert value(samples, "pagedkv_rpc_duration_seconds_count", "KvCache/GetSequence", "NOT_FOUND") > 0
    assert value(samples, "pagedkv_prefix_cache_hits_total", "prompt") > 0
    assert {name for name, _ in samples} == {name for metric in METRICS.values() for name in metric.series_names}
