#!/bin/sh
mkdir -p /logs/verifier
reward=0
# A link could lead to the expected report.
if [ -f /workspace/report.tsv ] && [ ! -L /workspace/report.tsv ]; then
    cmp /tests/expected.tsv /workspace/report.tsv && reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
