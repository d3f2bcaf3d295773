"""Whether more of a metric is better, by its name."""

GROWS = ("accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "r2", "iou", "map")
SHRINKS = ("loss", "error", "perplexity", "mse", "mae", "rmse", "nll", "err", "ppl", "wer", "cer")


def direction(metric: str) -> str | None:
    """``min`` or ``max`` by a metric's name, None if it does not say."""
    words = metric.lower().replace("/", "_").replace("-", "_").split("_")
    if any(word in SHRINKS for word in words):
        return "min"
    return "max" if any(word in GROWS for word in words) else None
