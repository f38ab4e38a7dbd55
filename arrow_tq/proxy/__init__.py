"""The rollout proxy: between agents and an engine, it records what each call sampled and routed.

``arrow-tq proxy`` runs it; ``docs/proxy.md`` says what it does to a call.
"""
