"""Where a model is wrong: one record for each image of an evaluation, what follows from them in
numbers, and pictures of both.

records.py collects them; confusion.py, calibration.py and precision.py are functions of arrays;
charts.py and contact_sheets.py draw; folder.py writes everything.
"""
