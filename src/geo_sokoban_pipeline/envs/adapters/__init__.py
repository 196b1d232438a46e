"""Environments of other libraries behind the protocol `InteractionEnv`; none is imported before it is used."""
