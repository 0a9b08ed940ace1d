// Loading in which only the newest state counts.

export class Newest {
  /** `load()` loads what is wanted now; `failed(error)` is called when it fails. */
  constructor(load, failed) {
    this.load = load;
    this.failed = failed;
    this.isLoading = false;
    this.isStale = false;
  }

  /** Loads; while one is on its way, only the newest state is loaded after it. */
  async refresh() {
    this.isStale = true;
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      while (this.isStale) {
        this.isStale = false;
        await this.load();
      }
    } catch (error) {
      this.failed(error);
    } finally {
      this.isLoading = false;
    }
  }
}
