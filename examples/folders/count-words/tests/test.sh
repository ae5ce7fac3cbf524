#!/bin/sh
# The program runs with no way to the reward but the numbers that it prints.
mkdir -p /logs/verifier
reward=$(python3 -E -s /tests/verify.py) || reward=0
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
