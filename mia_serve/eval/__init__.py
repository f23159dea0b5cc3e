"""Benchmarks, metrics, intervals and the retrieval evaluation."""
