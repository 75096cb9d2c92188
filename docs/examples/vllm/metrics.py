"""What an engine has counted."""

from graphllm import LLM, Counter, Gauge, Histogram, SamplingParams, Vector


def main(**options):
    llm = LLM(disable_log_stats=False, **options)
    llm.generate(["Hello", "What is", "The"], SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True))
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram): sum = {metric.sum}, count = {metric.count}")
            assert metric.buckets["+Inf"] == metric.count


if __name__ == "__main__":
    main()
