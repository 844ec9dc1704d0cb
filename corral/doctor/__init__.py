"""``corral doctor``: what is wrong with this host, why, and how it is put right. It changes nothing.

``effects`` looks, ``rules_*`` decide (pure), ``diagnosis`` joins them, ``page`` writes docs/doctor.md.
"""
