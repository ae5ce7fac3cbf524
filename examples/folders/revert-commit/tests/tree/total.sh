#!/bin/sh
# Prints the sum of all prices, in cents.
cat -- *.txt | awk '{ total += $2 } END { print total + 0 }'
