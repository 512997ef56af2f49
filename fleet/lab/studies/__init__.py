"""Studies: measurements that were run once as evidence, kept with their date, machine and numbers.

A study is run by `fleet bench`, which finds its module like the modules of `fleet.lab.measure`.
"""
