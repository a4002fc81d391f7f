"""Tests: ``unit``, ``property``, ``distributed``, ``integration``; ``launch`` runs the real ``pretrain_gpt.py``."""
