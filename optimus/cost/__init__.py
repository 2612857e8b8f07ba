"""Computes seconds of every kernel and bytes on every rank, from sourced numbers."""
