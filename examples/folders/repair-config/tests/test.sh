#!/bin/sh
mkdir -p /logs/verifier
reward=$(python3 -E -s /tests/verify.py) || reward=0
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
