"""The catalogue of levers of inference: one file each, with ``LEVER``, like those of training.

``apply`` changes the model of a Setup in evaluation mode; engines, which write and read files, are in ``infer/engines``
and take the value from the plan. ``observe`` reads back what a built runner has in force.
"""
