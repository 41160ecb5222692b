"""The metrics of one process. A number is recorded once, here; Prometheus and the run's records
both read it from here.

    metrics = Metrics(ACTOR, job="sums")
    tokens = metrics.counter("tokens_generated_total")  # raises UndeclaredMetric unless the catalog
    tokens.inc(17)                                      # has it for actors
    metrics.exposition()  # b'... pipelinerl_tokens_generated_total{job="sums",role="actor"} 17.0'
    metrics.values()      # {"tokens_generated_total": 17.0, ...}

prometheus_client's own Counter, Gauge and Histogram were considered. They lack weighted
observations, totals counted elsewhere, gauges without a value, callbacks per label and the bound on
labels, and take several times the memory, which counts for an operator of a thousand jobs.
"""

import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pipelinerl.v1.metrics_pb2 import MetricsRecord
from pipelinerl_common.metrics.catalog import CATALOG
from pipelinerl_common.metrics.exposition import exposition_of
from pipelinerl_common.metrics.metric import Kind, Metric

MAX_LABEL_VALUES: Final = 64
"""Label values of one metric beyond which further ones count as `other`, since some come from other
processes.
"""
OTHER: Final = "other"

LabelValues = tuple[str, ...]
Reading = Callable[[], float | None]


class UndeclaredMetric(Exception):
    """Raised for a name, kind, label or role that the catalog does not have."""


class _Series:
    """The values of one metric by its labels' values."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._lock = threading.Lock()

    def _key(self, labels: Mapping[str, str], known: Mapping[LabelValues, object]) -> LabelValues:
        if labels.keys() != self.metric.labels.keys():
            raise UndeclaredMetric(
                f"{self.metric.name} has the labels {sorted(self.metric.labels)}, it was given "
                f"{sorted(labels)}"
            )
        key = tuple(labels[name] for name in self.metric.labels)
        if key in known or len(known) < MAX_LABEL_VALUES:
            return key
        return (OTHER,) * len(key)


class _Read(_Series):
    """One value for each set of labels, stored here or read through a callback."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(metric)
        self._values: dict[LabelValues, float] = {}
        self._readings: dict[LabelValues, Reading] = {}

    def read(self, reading: Reading, **labels: str) -> None:
        """Calls `reading` whenever the value is needed, in the thread that needs it."""
        self._readings[self._key(labels, self._readings)] = reading

    @property
    def by_labels(self) -> dict[LabelValues, float]:
        asked = {key: reading() for key, reading in list(self._readings.items())}
        return {**self._values, **{key: value for key, value in asked.items() if value is not None}}


class Counter(_Read):
    """A number that only grows."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(metric)
        if len(metric.labels) < 2:
            self._values.update(dict.fromkeys(itertools.product(*metric.labels.values()), 0.0))

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        with self._lock:
            key = self._key(labels, self._values)
            self._values[key] = self._values.get(key, 0.0) + amount

    def reach(self, total: float, **labels: str) -> None:
        """Raises the total to at least this, for events that are counted elsewhere."""
        with self._lock:
            key = self._key(labels, self._values)
            self._values[key] = max(self._values.get(key, 0.0), total)


class Gauge(_Read):
    """A number that goes up and down, or has no value."""

    def set(self, value: float | None, **labels: str) -> None:
        with self._lock:
            key = self._key(labels, self._values)
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value


class Histogram(_Series):
    """Counts of values by size."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(metric)
        self.by_labels: dict[LabelValues, tuple[list[float], float]] = {}
        """Counts per bucket, the last for values above all bounds, and the sum."""
        if not metric.labels:
            self.by_labels[()] = (self._empty(), 0.0)

    def observe(self, value: float, count: float = 1.0, **labels: str) -> None:
        """Counts the value `count` times."""
        with self._lock:
            key = self._key(labels, self.by_labels)
            counts, total = self.by_labels.get(key) or (self._empty(), 0.0)
            counts = list(counts)
            counts[bisect_left(self.metric.buckets, value)] += count
            self.by_labels[key] = (counts, total + value * count)

    def _empty(self) -> list[float]:
        return [0.0] * (len(self.metric.buckets) + 1)

    def buckets(self, key: LabelValues) -> list[tuple[str, float]]:
        """(upper bound, number of values that are not above it), as Prometheus has them."""
        bounds = [*(f"{bound:g}" for bound in self.metric.buckets), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.by_labels[key][0]), strict=True))


_S = TypeVar("_S", Counter, Gauge, Histogram)


class Metrics(Collector):
    """Every metric that the catalog has for `role`, with the labels `job` and `role` on each.

    `namespace` is a label where one process reports jobs of several namespaces; Prometheus knows
    that of a pod by itself.
    """

    def __init__(self, role: str, job: str, namespace: str = "") -> None:
        self.role = role
        self.job = job
        self._labels = {**({"namespace": namespace} if namespace else {}), "job": job, "role": role}
        self._series: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str) -> Counter:
        """Raises UndeclaredMetric unless the catalog has the name as a counter of this role;
        `gauge` and `histogram` likewise.
        """
        return self._declared(name, Kind.COUNTER, Counter)

    def gauge(self, name: str) -> Gauge:
        return self._declared(name, Kind.GAUGE, Gauge)

    def histogram(self, name: str) -> Histogram:
        return self._declared(name, Kind.HISTOGRAM, Histogram)

    def _declared(self, name: str, kind: Kind, make: type[_S]) -> _S:
        series = self._series.get(name)
        if isinstance(series, make):
            return series
        metric = CATALOG.get(name)
        if metric is None:
            raise UndeclaredMetric(
                f"{name}: not in the catalog; add it to a table in "
                "pipelinerl_common/metrics/catalog.py"
            )
        if metric.kind is not kind or self.role not in metric.roles:
            raise UndeclaredMetric(
                f"{name}: the catalog has it as a {metric.kind} of {', '.join(metric.roles)}, not "
                f"as a {kind} of {self.role}"
            )
        made = self._series[name] = make(metric)
        return made

    @property
    def declared(self) -> frozenset[str]:
        """Names of the metrics that this process records."""
        return frozenset(self._series)

    def values(self) -> dict[str, float]:
        """Values for the run's records, by name and labels:
        {"groups_dropped_total{reason=stale}": 3.0, ...}. Counters with labels appear only above 0,
        so that records stay short.
        """
        return {
            key: value for series in list(self._series.values()) for key, value in _recorded(series)
        }

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return b"".join(exposition_of([self]))

    def collect(self) -> Iterator[Family]:
        for series in list(self._series.values()):
            yield self._family(series)

    def _family(self, series: Counter | Gauge | Histogram) -> Family:
        metric = series.metric
        names = [*self._labels, *metric.labels]
        values = list(self._labels.values())
        if isinstance(series, Histogram):
            histograms = HistogramMetricFamily(metric.series, metric.help, labels=names)
            for key in list(series.by_labels):
                histograms.add_metric(
                    [*values, *key], series.buckets(key), series.by_labels[key][1]
                )
            return histograms
        family_type = CounterMetricFamily if isinstance(series, Counter) else GaugeMetricFamily
        family = family_type(metric.series, metric.help, labels=names)
        for key, value in list(series.by_labels.items()):
            family.add_metric([*values, *key], value)
        return family


def _recorded(series: Counter | Gauge | Histogram) -> Iterator[tuple[str, float]]:
    name = series.metric.name
    if not isinstance(series, Histogram):
        for key, value in list(series.by_labels.items()):
            if value or not key or isinstance(series, Gauge):
                yield _record_key(name, series.metric, key), value
        return
    for key, (counts, total) in list(series.by_labels.items()):
        yield _record_key(f"{name}_sum", series.metric, key), total
        yield _record_key(f"{name}_count", series.metric, key), sum(counts)
        if series.metric.records_buckets:
            yield from (
                (f"{name}_bucket{{le={bound}}}", count) for bound, count in series.buckets(key)
            )


def _record_key(name: str, metric: Metric, values: LabelValues) -> str:
    if not values:
        return name
    labels = (f"{name}={value}" for name, value in zip(metric.labels, values, strict=True))
    return f"{name}{{{','.join(labels)}}}"


SCHEMA_VERSION = 1


def is_counter(key: str) -> bool:
    """Whether the key of a record's value names a counter, as "groups_dropped_total{reason=stale}"
    does.
    """
    return key.partition("{")[0].endswith("_total")


def record_of(metrics: Metrics, instance: str, step: int = -1) -> MetricsRecord:
    """A record of all metrics now. `instance` is the workload's name, `step` the number of finished
    optimizer steps, -1 when the record belongs to none.
    """
    return MetricsRecord(
        schema_version=SCHEMA_VERSION,
        job=metrics.job,
        role=metrics.role,
        instance=instance,
        time=time.time(),
        step=step,
        values=metrics.values(),
    )
