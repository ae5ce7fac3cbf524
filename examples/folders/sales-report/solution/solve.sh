#!/bin/sh
set -e
python3 - <<'END'
import csv
from collections import defaultdict
from decimal import Decimal

totals: dict[str, Decimal] = defaultdict(Decimal)
with open("/workspace/sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        if row["currency"] == "EUR" and "2026-01" <= row["date"][:7] <= "2026-06":
            totals[row["region"]] += Decimal(row["amount"])
with open("/workspace/report.tsv", "w") as report:
    for region, total in sorted(totals.items(), key=lambda item: -item[1]):
        report.write(f"{region}\t{total:.2f}\n")
END
