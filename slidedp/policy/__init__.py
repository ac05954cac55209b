"""Which layout is fastest: measure the machine, predict every layout, choose, and say why."""
