"""Read loggers' files with the packages' own message types and clients."""

import struct
from pathlib import Path
from typing import Any

Figures = dict[tuple[str, int], list[float]]  # (name, iteration) -> values, in the order they were written


def tensorboard_events(folder: Path) -> list[Any]:
    """Read all events of a folder in order. Checksums, which follow the length and the event, are not checked."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def tensorboard_figures(folder: Path) -> Figures:
    """Read the scalars as TensorBoard does: a new session discards earlier figures from its first step on."""
    figures: Figures = {}
    for event in tensorboard_events(folder):
        if event.HasField("session_log"):
            figures = {key: values for key, values in figures.items() if key[1] < event.step}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                figures.setdefault((value.tag, event.step), []).append(value.simple_value)
    return figures


def mlflow_run(uri: str, experiment: str = "cupynet") -> tuple[Any, Figures]:
    """Return the only run of an experiment, and its metrics."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    figures: Figures = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            figures.setdefault((name, metric.step), []).append(metric.value)
    return run, figures


REPORTED = ("loss", "accuracy", "score_after_averaging", "learning_rate", "images_per_s")
PER_EPOCH = ("epoch", "loss", "accuracy", "learning_rate", "images_per_s", "samples", "train_s")
TIMES = ("compute_s", "data_s", "averaging_s", "waiting_s")
OF_REPORTS = {
    **{f"train/{name}": name for name in REPORTED},
    **{f"replicas/{name}": name for name in ("drift", "bytes_sent")},
    **{f"time/{name}": name for name in TIMES},
}
OF_EPOCHS = {
    **{f"epoch/{name}": name for name in PER_EPOCH},
    "epoch/bytes_sent": "bytes_sent",
    **{f"{split}/{name}": f"{split}_{name}" for split in ("test", "validation") for name in ("accuracy", "loss")},
}


def expected(history: list[dict[str, Any]]) -> Figures:
    """Convert rows of history.jsonl to the names that loggers use."""
    found: Figures = {}
    for row in history:
        figures = {name: row.get(key) for name, key in (OF_REPORTS if row["kind"] == "report" else OF_EPOCHS).items()}
        if row["kind"] == "report":
            figures |= {f"replicas/drift/{layer}": apart for layer, apart in row["drift_by_layer"].items()}
        else:
            figures |= {f"epoch/{name}": sum(row[name]) for name in TIMES}
        found |= {(name, row["iteration"]): [value] for name, value in figures.items() if value is not None}
    return found
