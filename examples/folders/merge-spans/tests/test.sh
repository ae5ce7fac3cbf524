#!/bin/sh
# A run that ends without its report has not passed.
mkdir -p /logs/verifier
cd /workspace || exit 1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=/workspace
python3 -s -B -m pytest -p no:cacheprovider -q --rootdir=/tests -c /dev/null \
    --junitxml=/logs/verifier/junit.xml /tests/test_spans.py
if [ $? -eq 0 ] && [ -s /logs/verifier/junit.xml ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
