//! Costs on each machine: a table with one row per machine. lab/gpu-model.md lists the sources of the
//! numbers, and says how to use those of a real GPU.

use std::fmt::Write as _;

macro_rules! constants {
    ($($name:ident, $unit:literal, $what:literal;)*) => {
        /// A row of the table.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Machine {
            /// Name on the command line.
            pub name: String,
            $(#[doc = concat!($what, ", in ", $unit)] pub $name: f64,)*
        }

        impl Machine {
            /// Returns name, value, unit and meaning of each constant.
            pub fn constants(&self) -> Vec<(&'static str, f64, &'static str, &'static str)> {
                vec![$((stringify!($name), self.$name, $unit, $what),)*]
            }

            fn constant(&mut self, name: &str) -> Option<&mut f64> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

constants! {
    sms, "", "number of multiprocessors";
    ghz, "GHz", "clock rate of the multiprocessors";
    alu_cycles, "cycles", "latency of simple arithmetic";
    branch_cycles, "cycles", "from a branch to the next instruction";
    shared_cycles, "cycles", "load from shared memory; also used for shuffles and votes";
    l1_cycles, "cycles", "load that hits the first-level cache";
    l2_cycles, "cycles", "load that hits the second-level cache";
    constant_cycles, "cycles", "first access to a line of parameters";
    special_cycles, "cycles", "read of a special register";
    sync_cycles, "cycles", "sync of a block, excluding the cost per warp";
    cluster_cycles, "cycles", "load from the shared memory of another block of the cluster";
    cluster_sync_cycles, "cycles", "from the last arrival at a cluster's barrier to the next instruction";
    sync_warp_cycles, "cycles", "additional cost of a sync for each warp";
    acquire_cycles, "cycles", "additional latency of an acquiring load";
    fence_block_cycles, "cycles", "fence at block scope";
    fence_gpu_ns, "ns", "fence at GPU scope, no outstanding accesses";
    fence_system_ns, "ns", "fence at system scope, no outstanding accesses";
    fence_sc_system_ns, "ns", "sequentially consistent fence at system scope, no outstanding accesses";
    rank_skew_ns, "ns", "standard deviation of the times at which ranks begin a call";
    remote_load_ns, "ns", "round trip of a load from a peer";
    remote_store_ns, "ns", "from the issue of a store to a peer until it is visible there";
    link_gbps, "GB/s", "bandwidth between a GPU and all its peers, each direction, before deducting headers";
    link_packet_bytes, "B", "maximum data in a packet of the link";
    link_header_bytes, "B", "header of a packet, of a request, and of a reply";
    switch_ns, "ns", "latency that the switch adds to an in-switch reduction or multicast; 0: no such switch";
    switch_share, "", "data's share of a link's bytes, in-switch";
    link_partial_bytes, "B", "additional bytes of a packet with a partial sector";
    sm_store_bytes, "B/cycle", "stores of a multiprocessor to its own GPU's memory";
    sm_remote_bytes, "B/cycle", "stores of a multiprocessor to peers, in whole sectors";
    sm_load_bytes, "B/cycle", "loads of a multiprocessor that miss its first-level cache";
    sm_in_flight_bytes, "B", "maximum outstanding loads of a multiprocessor";
    l2_gbps, "GB/s", "bandwidth of the second-level cache, loads and stores";
    l2_bytes, "B", "size of the second-level cache";
    dram_cycles, "cycles", "load that misses the second-level cache";
    dram_gbps, "GB/s", "bandwidth of the memory";
    launch_ns, "ns", "from the end of a kernel to the first instruction of the next one in a stream";
    node_ns, "ns", "from the end of a kernel to the first instruction of the next node of a graph";
    dependent_ns, "ns", "from launch_dependents to the dependent's start; from a kernel's end to the end of the wait";
    cold_line_cycles, "cycles", "fetch of a 128-byte line of code that misses all caches of the multiprocessor";
}

/// Names of the rows.
pub const MACHINES: [&str; 5] = ["h100", "a100", "b200", "pcie5", "pcie4"];

fn h100() -> Machine {
    Machine {
        name: "h100".into(),
        sms: 132.0,
        ghz: 1.98,
        alu_cycles: 4.5,
        branch_cycles: 8.0,
        shared_cycles: 29.0,
        l1_cycles: 39.0,
        l2_cycles: 260.0,
        constant_cycles: 105.0,
        special_cycles: 20.0,
        sync_cycles: 22.0,
        cluster_cycles: 180.0,
        cluster_sync_cycles: 180.0,
        sync_warp_cycles: 2.0,
        acquire_cycles: 8.0,
        fence_block_cycles: 10.0,
        fence_gpu_ns: 135.0,
        fence_system_ns: 550.0,
        fence_sc_system_ns: 700.0,
        rank_skew_ns: 470.0,
        remote_load_ns: 830.0,
        remote_store_ns: 380.0,
        link_gbps: 450.0,
        link_packet_bytes: 128.0,
        link_header_bytes: 16.0,
        switch_ns: 130.0,
        switch_share: 0.85,
        link_partial_bytes: 16.0,
        sm_store_bytes: 64.0,
        sm_remote_bytes: 19.0,
        sm_load_bytes: 64.0,
        sm_in_flight_bytes: 60.0 * 1024.0,
        l2_gbps: 5500.0,
        l2_bytes: 50e6,
        dram_cycles: 700.0,
        dram_gbps: 3350.0,
        launch_ns: 2100.0,
        node_ns: 1300.0,
        dependent_ns: 800.0,
        cold_line_cycles: 40.0,
    }
}

fn a100() -> Machine {
    Machine {
        name: "a100".into(),
        sms: 108.0,
        ghz: 1.41,
        l2_cycles: 230.0,
        remote_load_ns: 900.0,
        remote_store_ns: 420.0,
        link_gbps: 300.0,
        switch_ns: 0.0,
        switch_share: 0.0,
        l2_gbps: 3900.0,
        l2_bytes: 40e6,
        dram_gbps: 1940.0,
        fence_gpu_ns: 190.0,
        ..h100()
    }
}

fn b200() -> Machine {
    Machine {
        name: "b200".into(),
        sms: 148.0,
        ghz: 1.97,
        l2_cycles: 330.0,
        fence_system_ns: 900.0,
        fence_sc_system_ns: 900.0,
        remote_load_ns: 1450.0,
        remote_store_ns: 790.0,
        link_gbps: 900.0,
        switch_share: 0.74,
        sm_load_bytes: 60.0,
        l2_gbps: 9000.0,
        l2_bytes: 126e6,
        dram_cycles: 810.0,
        dram_gbps: 8000.0,
        launch_ns: 2050.0,
        node_ns: 700.0,
        dependent_ns: 450.0,
        ..h100()
    }
}

/// PCIe cards without NVLink, all at one root complex.
fn pcie5() -> Machine {
    Machine {
        name: "pcie5".into(),
        sms: 188.0,
        ghz: 2.4,
        remote_load_ns: 1500.0,
        remote_store_ns: 800.0,
        link_gbps: 60.0,
        link_packet_bytes: 256.0,
        link_header_bytes: 24.0,
        switch_ns: 0.0,
        switch_share: 0.0,
        link_partial_bytes: 0.0,
        l2_gbps: 6000.0,
        l2_bytes: 128e6,
        dram_gbps: 1790.0,
        ..h100()
    }
}

fn pcie4() -> Machine {
    Machine { name: "pcie4".into(), sms: 108.0, ghz: 1.41, link_gbps: 30.0, l2_bytes: 40e6, ..pcie5() }
}

impl Machine {
    /// Returns the row of this name.
    pub fn named(name: &str) -> Option<Self> {
        [h100, a100, b200, pcie5, pcie4].into_iter().map(|row| row()).find(|row| row.name == name)
    }

    /// Returns the costs for each of several ranks that share this GPU: the memory of peers is the same
    /// second-level cache, of which each rank has an equal part, and launches of one process begin together.
    /// Each block has a multiprocessor of its own while the ranks together have no more blocks than there are
    /// multiprocessors.
    pub fn shared_by(&self, ranks: usize) -> Self {
        let part = 1.0 / ranks.max(1) as f64;
        let l2_ns = self.ns(self.l2_cycles);
        Self {
            rank_skew_ns: 0.0,
            remote_load_ns: l2_ns,
            remote_store_ns: l2_ns / 2.0,
            link_gbps: self.l2_gbps * part,
            link_header_bytes: 0.0,
            link_partial_bytes: 0.0,
            switch_ns: 0.0,
            switch_share: 0.0,
            sm_remote_bytes: self.sm_store_bytes,
            l2_gbps: self.l2_gbps * part,
            l2_bytes: self.l2_bytes * part,
            dram_gbps: self.dram_gbps * part,
            ..self.clone()
        }
    }

    /// Overrides constants by measured ones: lines of `name = value`, where `#` begins a comment; or the
    /// JSON report of `gpu-check`, which has an object `constants` of numbers.
    ///
    /// # Errors
    ///
    /// Reports the first line without a constant or with an unknown name, or a report without constants.
    pub fn put(&mut self, text: &str) -> Result<(), String> {
        match text.trim_start().starts_with('{') {
            true => self.put_lines(&constants_of_report(text)?),
            false => self.put_lines(text),
        }
    }

    fn put_lines(&mut self, text: &str) -> Result<(), String> {
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let wrong = |what: &str| format!("line {}: {what}: {line}", number + 1);
            let (name, value) = line.split_once('=').ok_or_else(|| wrong("no `name = value`"))?;
            let value: f64 = value.trim().parse().map_err(|_| wrong("no number"))?;
            if !(value.is_finite() && value >= 0.0) {
                return Err(wrong("no cost"));
            }
            *self.constant(name.trim()).ok_or_else(|| wrong("no such constant"))? = value;
        }
        Ok(())
    }

    /// Formats the constants as `put` reads them.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, value, unit, what) in self.constants() {
            let _ =
                writeln!(text, "{name} = {value} # {unit}{}{what}", if unit.is_empty() { "" } else { ": " });
        }
        text
    }

    /// Returns how much later than of two ranks the last of more ranks begins, on average: the expected maximum
    /// of normal variables. The latency constants were derived from calls of two ranks.
    pub(crate) fn skew_ns(&self, ranks: usize) -> f64 {
        const LAST_OF: [f64; 16] = [
            0.564, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424, 1.485, 1.539, 1.586, 1.629, 1.668, 1.703,
            1.736, 1.766,
        ];
        self.rank_skew_ns * (LAST_OF[ranks.clamp(1, 16) - 1] - LAST_OF[1])
    }

    pub(crate) fn cycles(&self, ns: f64) -> f64 {
        ns * self.ghz
    }

    pub(crate) fn ns(&self, cycles: f64) -> f64 {
        cycles / self.ghz
    }

    /// Converts a link's bandwidth to bytes per cycle.
    pub(crate) fn per_cycle(&self, gbps: f64) -> f64 {
        gbps / self.ghz
    }
}

/// Returns the constants of a report of `gpu-check`, as lines. No text before them in the report contains
/// their key.
fn constants_of_report(text: &str) -> Result<String, String> {
    let (_, rest) = text.split_once("\"constants\"").ok_or("this report has no constants")?;
    let object = rest.trim_start().strip_prefix(':').and_then(|rest| rest.trim_start().strip_prefix('{'));
    let (object, _) =
        object.and_then(|object| object.split_once('}')).ok_or("the report's constants are no object")?;
    if object.trim().is_empty() {
        let why = "its steps `costs` and `peers` did not run, or the clock changed meanwhile";
        return Err(format!("this report measured no constant: {why}"));
    }
    let mut lines = String::new();
    for entry in object.split(',') {
        let (name, value) = entry.split_once(':').ok_or_else(|| format!("no constant: {}", entry.trim()))?;
        let _ = writeln!(lines, "{} = {}", name.trim().trim_matches('"'), value.trim());
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_its_name_and_takes_its_own_text() {
        for name in MACHINES {
            let machine = Machine::named(name).unwrap();
            let mut again = Machine::named("h100").unwrap();
            again.put(&machine.text()).unwrap();
            assert_eq!(again.constants(), machine.constants());
        }
        assert_eq!(Machine::named("h101"), None);
    }

    #[test]
    fn a_report_of_gpu_check_is_taken() {
        let mut machine = h100();
        let report = "{\n  \"version\": \"0.1.0\",\n  \"constants\": {\n    \"ghz\": 1.755,\n    \
            \"fence_system_ns\": 6.1e2\n  },\n  \
                      \"steps\": []\n}\n";
        machine.put(report).unwrap();
        assert_eq!((machine.ghz, machine.fence_system_ns, machine.l2_cycles), (1.755, 610.0, 260.0));
        for (report, error) in [
            ("{\"steps\": []}", "no constants"),
            ("{\"constants\": 1}", "no object"),
            ("{\"constants\": {}, \"steps\": []}", "measured no constant"),
            ("{\"constants\": {\"l3_cycles\": 1}}", "no such constant"),
            ("{\"constants\": {\"l2_cycles\": null}}", "no number"),
        ] {
            assert!(machine.put(report).unwrap_err().contains(error), "{report}");
        }
    }

    #[test]
    fn ranks_on_one_gpu_share_its_cache_and_have_no_links() {
        let machine = h100().shared_by(4);
        assert_eq!((machine.l2_gbps, machine.link_gbps, machine.l2_bytes), (1375.0, 1375.0, 12.5e6));
        assert!((machine.remote_load_ns * machine.ghz - machine.l2_cycles).abs() < 1e-9);
        assert_eq!((machine.skew_ns(4), machine.node_ns), (0.0, h100().node_ns));
    }

    #[test]
    fn what_is_no_constant_is_an_error_with_its_line() {
        let mut machine = h100();
        assert!(machine
            .put("# measured\nl2_cycles = 1 # yes\nl3_cycles = 2")
            .unwrap_err()
            .contains("line 3"));
        for text in ["l2_cycles", "l2_cycles = x", "l2_cycles = -1", "l2_cycles = inf"] {
            assert!(machine.put(text).is_err(), "{text}");
        }
    }
}
