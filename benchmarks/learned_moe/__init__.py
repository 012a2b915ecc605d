"""A small mixture-of-experts model that has learned something, so that routing by expert has real
signatures to work with.  `python -m benchmarks.learned_moe --help` teaches; `model/` holds it."""
