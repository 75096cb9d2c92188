# from the repository root on the device: compile beside each other, then check and time
nvidia-smi --query-gpu=name --format=csv,noheader
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
for i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do timeout 120 python3 .exp_encoded/bench.py compile $i 14 > $OUT/c$i.txt 2>&1 & done; wait; cat $OUT/c*.txt | sort | uniq | head -20; rm $OUT/c*.txt; echo compiled ${SECONDS}s
LIMIT=${LIMIT:-60} timeout 150 python3 .exp_encoded/bench.py run > $OUT/run.txt 2>&1; echo ran ${SECONDS}s; head -c 11000 $OUT/run.txt
